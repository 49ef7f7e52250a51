"""Finds the rank that is slower than the others, before it is a failure."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.activity import read_own_seconds
from training.heartbeat import Beat
from training.phases import PHASES

_OWN = tuple(PHASES.index(name) for name in ("data_wait", "forward", "backward", "optimizer"))
"""What a rank does by itself. In `communication` it waits for others; checkpoints have a pace of
their own."""
_COMPUTING = "what it computes"
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

    A rank is named once it has needed more than `ratio` times the median of its peers, in two
    windows of some seconds and steps one after the other, and again only if it was not so for a
    window in between.

    peers: how many ranks, one after another, have the same work; the stages of a pipeline have not.
    waits_inside: whether layers are split over ranks (tensor parallelism, pipelines, shards), which
    then wait for each other inside their passes. A wait takes no processor, so what counts is the
    time in which the rank's thread has run, or was kept from running.
    """

    def __init__(
        self,
        ratio: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        peers: int | None = None,
        waits_inside: bool = False,
        read_own: Callable[[int], float] = read_own_seconds,
    ) -> None:
        self._ratio = ratio
        self._clock = clock
        self._peers = peers
        self._waits_inside = waits_inside
        self._read_own = read_own
        self._since = 0.0
        self._before: dict[int, _Spent] = {}
        self._num_late: dict[int, int] = {}

    def look(self, beats: Sequence[Beat], num_ranks: int) -> list[Straggler]:
        """Those that are found by now."""
        begun = {beat.rank: beat for beat in beats if beat.phase_seconds and beat.step}
        if num_ranks < 2 or len(begun) < num_ranks:
            return []
        now = self._clock()
        if self._before:
            steps = min(beat.step - self._before[rank].step for rank, beat in begun.items())
            if now - self._since < _WINDOW_SECONDS or steps < _WINDOW_STEPS:
                return []
        spent = {rank: self._read(beat) for rank, beat in begun.items()}
        before, self._since, self._before = self._before, now, spent
        if not before:
            return []
        each = {rank: _divide(before[rank], one) for rank, one in spent.items()}
        size, ranks = self._peers or num_ranks, sorted(begun)
        groups = [ranks[first : first + size] for first in range(0, num_ranks, size)]
        return [
            found
            for group in groups
            for rank in group
            if (found := self._judge(rank, {other: each[other] for other in group}))
        ]

    def _read(self, beat: Beat) -> "_Spent":
        if not self._waits_inside:
            return _Spent(beat.step, {PHASES[one]: beat.phase_seconds[one] for one in _OWN})
        seconds = {
            "data_wait": beat.phase_seconds[PHASES.index("data_wait")],
            _COMPUTING: self._read_own(beat.pid),
        }
        return _Spent(beat.step, seconds)

    def _judge(self, rank: int, spent: dict[int, dict[str, float]]) -> Straggler | None:
        own = sum(spent[rank].values())
        others = [phases for other, phases in spent.items() if other != rank]
        if not others:
            return None
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
        worst = max(excess, key=excess.__getitem__)
        return Straggler(
            rank,
            own - usual,
            f"is {own - usual:.3f} s late in each step: its own part takes {own:.3f} s, that of "
            f"the others {usual:.3f} s, and most of the difference is in {worst}",
        )


@dataclass(frozen=True)
class _Spent:
    """Of one rank, up to a step."""

    step: int
    seconds: dict[str, float]
    """On its own part, by what it did."""


def _divide(before: _Spent, after: _Spent) -> dict[str, float]:
    """Seconds a step."""
    steps = after.step - before.step
    return {name: (after.seconds[name] - before.seconds[name]) / steps for name in after.seconds}
