"""Finds a world that makes no progress, and the rank that keeps it."""

import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from training.heartbeat import ENDED, STARTING, Beat

# What a rank does by itself, at a pace that the steps before say nothing of.
_OWN_PACE = (STARTING, "data_wait", "checkpoint", ENDED)
_STACK_SECONDS = 0.5
_BUSY_BYTES = 4096
"""More than whoever looks for a silent node sends."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Hang:
    """A world without progress."""

    rank: int
    why: str
    """For a user: what the rank is doing and what the others wait for."""
    seconds: float
    """Since the last progress."""


class HangWatch:
    """Judges one world by its ranks' beats.

    The bound is three median steps and a second, and holds while every rank is inside a step and
    none of them works or receives, or one is stopped. Loading data, saving and starting have a
    bound of their own, `patience_seconds`, which also ends a world whose ranks are busy but get
    nowhere.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._began = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._step = 0
        self._quiet_since: tuple[float, dict[int, tuple[float, int]]] | None = None

    def look(self, beats: Sequence[Beat], num_ranks: int) -> Hang | None:
        """The hang, if there is one by now."""
        if len(beats) < num_ranks:
            waited = time.monotonic() - self._began
            if waited > self._patience_seconds:
                rank = min(set(range(num_ranks)) - {beat.rank for beat in beats})
                return Hang(rank, f"rank {rank} has not begun after {waited:.1f} s", waited)
        if not beats:
            return None
        newest = max(beat.step for beat in beats)
        if newest != self._step:
            self._step = newest
            self._step_seconds.extend(b.step_seconds for b in beats[:1] if b.step_seconds)
        seconds = time.monotonic() - max(beat.changed for beat in beats)
        if seconds > self._patience_seconds:
            return self._name(beats, seconds)
        if len(beats) < num_ranks or seconds < self.bound_seconds:
            self._quiet_since = None
            return None
        if any(read_state(beat.pid) == "T" for beat in beats):
            return self._name(beats, seconds)
        own_pace = any(beat.phase in _OWN_PACE for beat in beats)
        return None if own_pace or self._is_busy(beats) else self._name(beats, seconds)

    @property
    def bound_seconds(self) -> float:
        """Silence within a step that is not yet a hang."""
        return 1.0 + 3 * statistics.median(self._step_seconds or [self._patience_seconds])

    def _is_busy(self, beats: Sequence[Beat]) -> bool:
        """Whether a rank has used the processor, or a link of its own that may be slow, since this
        was first asked; a wait uses neither."""
        now = time.monotonic()
        used = {
            beat.rank: (read_cpu_seconds(beat.pid), read_link_bytes(beat.pid)) for beat in beats
        }
        if self._quiet_since is None:
            self._quiet_since = (now, used)
            return True
        since, before = self._quiet_since
        if now - since < 0.3:
            return True
        self._quiet_since = (now, used)
        return any(
            seconds - before[rank][0] > 0.2 * (now - since)
            or num_bytes - before[rank][1] > _BUSY_BYTES
            for rank, (seconds, num_bytes) in used.items()
            if rank in before
        )

    def _name(self, beats: Sequence[Beat], seconds: float) -> Hang:
        stopped = [beat for beat in beats if read_state(beat.pid) == "T"]
        # All others wait for the one that is furthest behind.
        late = min(stopped or beats, key=lambda beat: (beat.step, beat.changed))
        others = [f"{b.rank} in {b.phase}" for b in beats if b is not late]
        what = "is stopped" if stopped else "makes no progress"
        waits = f"; rank {', rank '.join(others[:8])} of step {self._step}" if others else ""
        return Hang(
            rank=late.rank,
            why=f"rank {late.rank} {what} in {late.phase} of step {late.step} "
            f"for {seconds:.1f} s{waits}",
            seconds=seconds,
        )


def dump_stacks(beats: Sequence[Beat], directory: Path) -> dict[int, str]:
    """The Python stacks of the ranks, names of files and functions alone, by rank; a rank that
    cannot answer, because it is stopped, has none.

    Each worker has `faulthandler` write them to its file at SIGUSR1, which needs no lock of the
    interpreter.
    """
    for beat in beats:
        stack_path(directory, beat.rank).write_bytes(b"")
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGUSR1)
    time.sleep(_STACK_SECONDS)
    stacks = {beat.rank: stack_path(directory, beat.rank).read_text() for beat in beats}
    return {rank: stack for rank, stack in stacks.items() if stack}


def stack_path(directory: Path, rank: int) -> Path:
    """Where a rank's stacks are written."""
    return directory / f"stack-{rank}.txt"


def read_state(pid: int) -> str:
    """One letter, as `ps` shows it: T for stopped; empty when the process is gone."""
    fields = _read_stat(pid)
    return fields[0] if fields else ""


def read_cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process; 0 when it is gone."""
    fields = _read_stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND if fields else 0.0


def read_link_bytes(pid: int) -> int:
    """What came over the links of a process that has a network namespace of its own; 0 for one that
    shares this one's, where it could be anybody's."""
    try:
        if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            return 0
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    devices = (line.split(":") for line in lines)
    return sum(int(numbers.split()[0]) for name, numbers in devices if name.strip() != "lo")


def _read_stat(pid: int) -> list[str]:
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name, in parentheses, may hold anything.
    return content[content.rindex(")") + 2 :].split()
