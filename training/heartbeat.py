"""Where each rank is, in a file of a few bytes that the supervisor reads while the rank runs.

Progress is the step and the phase, not a sign that a thread is alive: a thread goes on while a
training hangs.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from training.phases import OTHER, PHASES

STARTING = "starting"
ENDED = "ended"
_PHASES = (*PHASES, OTHER, STARTING, ENDED)
# pid, first step of this world, present step, phase, CLOCK_MONOTONIC of the last change, seconds
# of the last step, attempts that were void, seconds in each phase.
_LAYOUT = struct.Struct(f"<qqqqddq{len(PHASES)}d")
_PHASE, _CHANGED = 3, 4  # of these fields, eight bytes each
_NO_SECONDS = (0.0,) * len(PHASES)


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    rank: int
    pid: int
    first_step: int
    """The one that this world began with; 0 before."""
    step: int
    """The step that it is in."""
    phase: str
    changed: float
    """When it came there, by the machine's monotonic clock, in seconds."""
    step_seconds: float
    """Of the last whole step; 0 before."""
    phase_seconds: tuple[float, ...] = ()
    """Time in each of PHASES in all whole steps of this world."""
    num_void: int = 0
    """Steps that were begun and made again, because a replica was lost meanwhile."""


class Heartbeat:
    """Written by one rank. A call costs less than a microsecond and never blocks."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = _path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        pending = path.with_suffix(".tmp")
        pending.write_bytes(bytes(_LAYOUT.size))
        with pending.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        whole = memoryview(self._memory)
        self._phases, self._times = whole.cast("q"), whole.cast("d")
        self._pid = os.getpid()
        self._first_step = 0
        self._step = 0
        self._num_void = 0
        self._began = time.monotonic()
        self._before = _NO_SECONDS
        self._write(_PHASES.index(STARTING), self._began, 0.0, _NO_SECONDS)
        pending.rename(path)

    def enter(self, phase: int, now: float | None = None) -> None:
        """Say that a phase begins, by its index in PHASES, or one more for `other`, at this time of
        the monotonic clock."""
        # The time first: whoever reads between the two finds the phase before, and it is young.
        self._times[_CHANGED] = time.monotonic() if now is None else now
        self._phases[_PHASE] = phase

    def begin_step(self, step: int, seconds: Sequence[float] = _NO_SECONDS) -> None:
        """Say that a step begins, and so that the one before it is done.

        seconds: in each of PHASES up to now, counted from whenever.
        """
        now = time.monotonic()
        step_seconds = now - self._began if self._step else 0.0
        self._step, self._began = step, now
        if not self._first_step:
            self._first_step = step
            self._before = tuple(seconds)  # the time to the first step is none of it
        spent = [seconds[phase] - self._before[phase] for phase in range(len(PHASES))]
        self._write(len(PHASES), now, step_seconds, spent)

    def wait(self) -> None:
        """Say that this rank waits for what others do at a pace of their own."""
        self.enter(_PHASES.index(STARTING))

    def void_step(self) -> None:
        """Say that the present step is to be made again."""
        self._num_void += 1

    def end(self) -> None:
        """Say that there are no more steps."""
        self.enter(_PHASES.index(ENDED))

    def _write(
        self, phase: int, changed: float, step_seconds: float, spent: Sequence[float]
    ) -> None:
        # One copy: packed in place, a field would be zero for a moment, and might be read then.
        self._memory[:] = _LAYOUT.pack(
            self._pid,
            self._first_step,
            self._step,
            phase,
            changed,
            step_seconds,
            self._num_void,
            *spent,
        )


def read_beats(directory: Path) -> list[Beat]:
    """Of every rank of the present world that has come so far, by rank."""
    beats = []
    folder = str(directory / "progress")
    # Read several times a second beside the training: pathlib makes an object for each name.
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for name in names:
        rank_text = name.removeprefix("rank-")
        if not rank_text.isdecimal():
            continue
        try:
            with open(f"{folder}/{name}", "rb", buffering=0) as file:
                content = _LAYOUT.unpack(file.read())
        except FileNotFoundError:  # cleared meanwhile
            continue
        pid, first, step, phase, changed, seconds, num_void, *by_phase = content
        rank = int(rank_text)
        spent = tuple(by_phase)
        place = _PHASES[phase]
        beats.append(Beat(rank, pid, first, step, place, changed, seconds, spent, num_void))
    return beats


def clear_beats(directory: Path) -> None:
    """Forget what the ranks of an earlier world said."""
    for path in (directory / "progress").glob("rank-*"):
        path.unlink()


def clear_beat(directory: Path, rank: int) -> None:
    """Forget what one rank said, which is gone."""
    _path(directory, rank).unlink(missing_ok=True)


def _path(directory: Path, rank: int) -> Path:
    return directory / "progress" / f"rank-{rank:04d}"
