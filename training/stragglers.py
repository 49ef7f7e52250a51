"""Finds the rank that is slower than the others, before it is a failure."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.heartbeat import Beat
from training.phases import PHASES

_OWN = tuple(PHASES.index(name) for name in ("data_wait", "forward", "backward", "optimizer"))
"""What a rank does by itself. In `communication` it waits for others; checkpoints have a pace of
their own."""
_WINDOW_SECONDS = 2.0
_WINDOW_STEPS = 5
_NUM_WINDOWS = 2
_LEAST_SECONDS = 0.005


@dataclass(frozen=True)
class Straggler:
    """A rank that keeps the others waiting in every step."""

    rank: int
    late_seconds: float
    """By which its own part of a step is longer than the median of the others."""
    why: str
    """For a user."""


class StragglerWatch:
    """Judges one world by its ranks' beats: by the time that each spends on its own part of a step.

    A rank is named once it has needed more than `ratio` times the median of the others, in two
    windows of some seconds and steps one after the other, and again only if it was not so for a
    window in between. Where layers are split over ranks (tensor parallelism, pipelines, shards),
    ranks wait for each other inside those parts, and none stands out.
    """

    def __init__(self, ratio: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ratio = ratio
        self._clock = clock
        self._since = 0.0
        self._before: dict[int, Beat] = {}
        self._num_late: dict[int, int] = {}

    def look(self, beats: Sequence[Beat], num_ranks: int) -> list[Straggler]:
        """Those that are found by now."""
        begun = {beat.rank: beat for beat in beats if beat.phase_seconds and beat.step}
        if num_ranks < 2 or len(begun) < num_ranks:
            return []
        now = self._clock()
        if not self._before:
            self._since, self._before = now, begun
        num_steps = min(beat.step - self._before[rank].step for rank, beat in begun.items())
        if now - self._since < _WINDOW_SECONDS or num_steps < _WINDOW_STEPS:
            return []
        spent = {rank: _divide(self._before[rank], beat) for rank, beat in begun.items()}
        self._since, self._before = now, begun
        return [found for rank in spent if (found := self._judge(rank, spent))]

    def _judge(self, rank: int, spent: dict[int, dict[int, float]]) -> Straggler | None:
        own = sum(spent[rank].values())
        others = [phases for other, phases in spent.items() if other != rank]
        usual = statistics.median(sum(phases.values()) for phases in others)
        if own <= self._ratio * usual + _LEAST_SECONDS:
            self._num_late[rank] = 0
            return None
        self._num_late[rank] = self._num_late.get(rank, 0) + 1
        if self._num_late[rank] != _NUM_WINDOWS:
            return None
        excess = {
            phase: seconds - statistics.median(phases[phase] for phases in others)
            for phase, seconds in spent[rank].items()
        }
        worst = PHASES[max(excess, key=excess.__getitem__)]
        return Straggler(
            rank,
            own - usual,
            f"is {own - usual:.3f} s late in each step: its own part takes {own:.3f} s, that of "
            f"the others {usual:.3f} s, and most of the difference is in {worst}",
        )


def _divide(before: Beat, after: Beat) -> dict[int, float]:
    """Seconds a step in each of its own phases."""
    steps = after.step - before.step
    return {
        phase: (after.phase_seconds[phase] - before.phase_seconds[phase]) / steps for phase in _OWN
    }
