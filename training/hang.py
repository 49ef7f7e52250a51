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

from training.activity import Activity, read_activity, read_state
from training.heartbeat import ENDED, STARTING, Beat

# What a rank does by itself, at a pace that the steps before say nothing of.
_OWN_PACE = (STARTING, "data_wait", "checkpoint", ENDED)
_STACK_SECONDS = 0.5
"""In which a rank that can answer writes its stacks."""
_LEAST_SECONDS = 0.3
"""Over which it is looked whether a rank goes on."""


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
    none of them works or receives, or one is stopped. A rank that a loaded machine gives no
    processor is not waited for by the others alone: it does not hang. Loading data, saving and
    starting have a bound of their own, `patience_seconds`, which also ends a world whose ranks are
    busy but get nowhere.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._began = time.monotonic()
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._step = 0
        self._quiet_since: tuple[float, dict[int, Activity]] | None = None

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
        return None if own_pace or self._goes_on(beats) else self._name(beats, seconds)

    @property
    def bound_seconds(self) -> float:
        """Silence within a step that is not yet a hang."""
        return 1.0 + 3 * statistics.median(self._step_seconds or [self._patience_seconds])

    def _goes_on(self, beats: Sequence[Beat]) -> bool:
        """Whether a rank has been at work, or kept from it by a machine that others use, since this
        was first asked; a wait for another rank is neither."""
        now = time.monotonic()
        done = {beat.rank: read_activity(beat.pid) for beat in beats}
        if self._quiet_since is None:
            self._quiet_since = (now, done)
            return True
        since, before = self._quiet_since
        if now - since < _LEAST_SECONDS:
            return True
        self._quiet_since = (now, done)
        return any(
            activity.has_gone_on(before[rank], now - since)
            for rank, activity in done.items()
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
    asked = [beat for beat in beats if read_state(beat.pid) != "T"]
    deadline = time.monotonic() + _STACK_SECONDS
    sizes, before = _measure(directory, asked), None
    while time.monotonic() < deadline and not (all(sizes) and sizes == before):
        time.sleep(_STACK_SECONDS / 10)
        sizes, before = _measure(directory, asked), sizes
    stacks = {beat.rank: stack_path(directory, beat.rank).read_text() for beat in beats}
    return {rank: stack for rank, stack in stacks.items() if stack}


def _measure(directory: Path, beats: Sequence[Beat]) -> list[int]:
    return [stack_path(directory, beat.rank).stat().st_size for beat in beats]


def stack_path(directory: Path, rank: int) -> Path:
    """Where a rank's stacks are written."""
    return directory / f"stack-{rank}.txt"
