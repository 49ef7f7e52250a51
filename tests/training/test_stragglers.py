"""A slow rank is named with its lateness, before it is a failure."""

from training.heartbeat import Beat
from training.phases import PHASES
from training.stragglers import Straggler, StragglerWatch


def _beats(step: int, forward: list[float], waits: bool = True) -> list[Beat]:
    """After so many steps in each of which the ranks spent these seconds in their forward pass, and
    waited for the slowest."""
    beats = []
    for rank, seconds in enumerate(forward):
        spent = dict.fromkeys(PHASES, 0.0)
        spent["forward"] = seconds * step
        spent["backward"] = 0.02 * step
        spent["communication"] = (max(forward) - seconds) * step if waits else 0.0
        spent["checkpoint"] = 5.0 * step  # has a pace of its own
        beats.append(Beat(rank, 0, 1, step, "forward", 0.0, 0.1, tuple(spent.values())))
    return beats


def _watch(seconds_each: list[list[float]]) -> list[list[Straggler]]:
    """What is found after windows of ten steps and three seconds."""
    now = 0.0
    watch = StragglerWatch(2.0, lambda: now)
    found, step, totals = [], 1, [0.0] * len(seconds_each[0])
    assert watch.look(_beats(step, seconds_each[0]), len(totals)) == []
    for seconds in seconds_each:
        now += 3.0
        before, step = step, step + 10
        totals = [
            (total * before + one * 10) / step
            for total, one in zip(totals or seconds, seconds, strict=True)
        ]
        found.append(watch.look(_beats(step, totals), len(totals)))
    return found


def test_a_slow_rank_is_named_once_until_it_recovers() -> None:
    slow, even = [0.1, 0.1, 0.5], [0.1, 0.1, 0.1]
    first, second, third, fourth, fifth, sixth = _watch([slow, slow, slow, even, slow, slow])
    assert (first, third, fourth, fifth) == ([], [], [], [])
    [named], [again] = second, sixth
    assert (named.rank, again.rank) == (2, 2)
    assert 0.35 < named.late_seconds < 0.45
    assert "most of the difference is in forward" in named.why


def test_equal_ranks_and_small_differences_are_left_alone() -> None:
    assert not any(_watch([[0.1, 0.1, 0.1]] * 4))
    assert not any(_watch([[0.1, 0.1, 0.17]] * 4))
    assert not any(_watch([[0.1]] * 4))


def test_a_window_waits_for_steps_of_all_ranks() -> None:
    now = 0.0
    watch = StragglerWatch(2.0, lambda: now)
    watch.look(_beats(1, [0.1, 0.9]), 2)
    now = 100.0
    assert watch.look(_beats(1, [0.1]), 2) == []  # one is still starting
    assert watch.look(_beats(3, [0.1, 0.9]), 2) == []  # two steps are no window
