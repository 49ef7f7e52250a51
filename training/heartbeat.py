"""Where each rank is, in a file of a few bytes that the supervisor reads while the rank runs.

Progress is the step and the phase, not a sign that a thread is alive: a thread goes on while a
training hangs.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from training.phases import OTHER, PHASES

STARTING = "starting"
ENDED = "ended"
_PHASES = (*PHASES, OTHER, STARTING, ENDED)
# pid, first step of this world, present step, phase, CLOCK_MONOTONIC of the last change, seconds
# of the last step, seconds in each phase.
_LAYOUT = struct.Struct(f"<qqqqdd{len(PHASES)}d")


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


class Heartbeat:
    """Written by one rank. A call costs about a microsecond and never blocks."""

    def __init__(self, directory: Path, rank: int) -> None:
        path = _path(directory, rank)
        path.parent.mkdir(exist_ok=True)
        pending = path.with_suffix(".tmp")
        pending.write_bytes(bytes(_LAYOUT.size))
        with pending.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._pid = os.getpid()
        self._first_step = 0
        self._step = 0
        self._step_seconds = 0.0
        self._began = self._changed = time.monotonic()
        self._phase = _PHASES.index(STARTING)
        self._running = [0.0] * len(_PHASES)
        self._whole = [0.0] * len(PHASES)
        self.enter(self._phase)
        pending.rename(path)

    def enter(self, phase: int) -> None:
        """Say that a phase begins, by its index in PHASES, or one more for `other`."""
        now = time.monotonic()
        self._running[self._phase] += now - self._changed
        self._phase, self._changed = phase, now
        # One copy: packed in place, a field would be zero for a moment, and might be read then.
        self._memory[:] = _LAYOUT.pack(
            self._pid,
            self._first_step,
            self._step,
            phase,
            now,
            self._step_seconds,
            *self._whole,
        )

    def begin_step(self, step: int) -> None:
        """Say that a step begins, and so that the one before it is done."""
        now = time.monotonic()
        self._step_seconds = now - self._began if self._step else 0.0
        self._step, self._began = step, now
        if self._first_step:
            self._whole = self._running[: len(PHASES)]
        else:
            self._first_step = step
            self._running = [0.0] * len(_PHASES)  # the time to the first step is none of it
        self.enter(len(PHASES))

    def end(self) -> None:
        """Say that there are no more steps."""
        self.enter(_PHASES.index(ENDED))


def read_beats(directory: Path) -> list[Beat]:
    """Of every rank of the present world that has come so far, by rank."""
    beats = []
    for path in sorted((directory / "progress").glob("rank-*[0-9]")):
        try:
            pid, first, step, phase, changed, seconds, *by_phase = _LAYOUT.unpack(path.read_bytes())
        except FileNotFoundError:  # cleared meanwhile
            continue
        rank = int(path.name.removeprefix("rank-"))
        spent = tuple(by_phase)
        beats.append(Beat(rank, pid, first, step, _PHASES[phase], changed, seconds, spent))
    return beats


def clear_beats(directory: Path) -> None:
    """Forget what the ranks of an earlier world said."""
    for path in (directory / "progress").glob("rank-*"):
        path.unlink()


def _path(directory: Path, rank: int) -> Path:
    return directory / "progress" / f"rank-{rank:04d}"
