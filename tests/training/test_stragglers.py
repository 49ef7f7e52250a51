"""A slow rank is named with its lateness, before it is a failure."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from tests.training.ranks import run_ranks
from training.heartbeat import Beat, Heartbeat, read_beats
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


def test_those_that_are_left_are_compared_by_their_own_numbers() -> None:
    now = 0.0
    watch = StragglerWatch(2.0, lambda: now)
    found = []
    for step in (1, 11, 21):
        left = [beat for beat in _beats(step, [0.1, 0.1, 0.5]) if beat.rank != 1]
        found += watch.look(left, 2)
        now += 3.0
    assert [straggler.rank for straggler in found] == [2]


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


def test_where_layers_are_split_the_rank_that_computes_longest_is_named() -> None:
    """All need equally long, for they wait for each other inside their passes."""
    now, own = 0.0, dict.fromkeys(range(4), 0.0)

    def look(watch: StragglerWatch, step: int) -> list[Straggler]:
        beats = [replace(beat, pid=beat.rank) for beat in _beats(step, [0.5] * 4)]
        return watch.look(beats, 4)

    alike, stages = (
        StragglerWatch(2.0, lambda: now, peers=peers, waits_inside=True, read_own=own.__getitem__)
        for peers in (4, 2)
    )
    assert look(alike, 1) == look(stages, 1) == []
    named: list[list[Straggler]] = [[], []]
    for step in (11, 21):
        now += 3.0
        # The last two ranks are the second stage of a pipeline, which has more to do.
        for rank, seconds in enumerate((0.01, 0.06, 0.1, 0.1)):
            own[rank] += 10 * seconds
        for watch, found in zip((alike, stages), named, strict=True):
            found += look(watch, step)
    assert [one.rank for one in named[1]] == [1]
    assert 0.045 < named[1][0].late_seconds < 0.055
    assert "most of the difference is in what it computes" in named[1][0].why
    assert [one.rank for one in named[0]] == []


def _step_together(directory: Path) -> None:
    """In each rank: passes inside which ranks wait for each other; rank 1 computes for longer."""
    import torch
    import torch.distributed as dist

    from training.timing import StepTimer

    rank = dist.get_rank()
    heartbeat = Heartbeat(directory, rank)
    timer = StepTimer(on_phase=heartbeat.enter)
    step, is_over = 0, torch.zeros(1)
    while not is_over:
        step += 1
        heartbeat.begin_step(step, timer.seconds)
        with timer.phase("forward"):
            until = time.thread_time() + (0.08 if rank else 0.01)
            while time.thread_time() < until:
                pass
            is_over.fill_((directory / "over").exists())
            dist.all_reduce(is_over)


def test_ranks_that_really_wait_inside_their_passes(tmp_path: Path) -> None:
    watch = StragglerWatch(2.0, peers=2, waits_inside=True)
    by_phases = StragglerWatch(2.0)
    named: list[Straggler] = []
    wrongly: list[Straggler] = []

    def look() -> None:
        deadline = time.monotonic() + 120
        while not named and time.monotonic() < deadline:
            beats = read_beats(tmp_path)
            named.extend(watch.look(beats, 2))
            wrongly.extend(by_phases.look(beats, 2))
            time.sleep(0.1)
        (tmp_path / "over").touch()

    looking = threading.Thread(target=look)
    looking.start()
    run_ranks(2, _step_together, tmp_path)
    looking.join()
    assert [one.rank for one in named] == [1]
    assert wrongly == []  # the time that passes in them says nothing
