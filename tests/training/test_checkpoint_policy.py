"""When a checkpoint is due and which are kept, by a clock that the test turns."""

from datetime import UTC, datetime
from typing import Any

import pytest

from training.checkpoint_commit import Commit, Found
from training.checkpoint_identity import explain_difference
from training.checkpoint_policy import (
    Timetable,
    best_interval_seconds,
    choose_kept,
    expect_failure_seconds,
)
from training.config import CheckpointConfig


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def due_steps(
    num_steps: int, step_seconds: float, cost_seconds: float = 0.0, **config: Any
) -> tuple[list[int], int]:
    """Steps at which a checkpoint is due, and how often the ranks spoke about it."""
    clock = Clock()
    spoken: list[int] = []

    def share(number: int) -> int:
        spoken.append(number)
        return number

    table = Timetable(CheckpointConfig(**config), share, clock=clock)
    due = []
    for step in range(1, num_steps + 1):
        clock.seconds += step_seconds
        if table.due(step):
            due.append(step)
            clock.seconds += cost_seconds
            table.note(step, cost_seconds)
    return due, len(spoken)


def test_by_steps() -> None:
    assert due_steps(350, 1.0) == ([100, 200, 300], 0)
    assert due_steps(35, 1.0, every_steps=10) == ([10, 20, 30], 0)


def test_by_seconds_and_the_ranks_seldom_speak() -> None:
    due, num_spoken = due_steps(4000, 0.01, every_seconds=10.0)
    assert due == [1000, 2000, 3000, 4000]
    assert num_spoken < 60


def test_by_seconds_when_a_step_takes_longer() -> None:
    assert due_steps(4, 30.0, every_seconds=10.0)[0] == [1, 2, 3, 4]


def test_by_steps_and_by_seconds() -> None:
    due, _ = due_steps(100, 1.0, every_steps=50, every_seconds=30.0)
    assert due == [30, 50, 80, 100]


def test_auto_follows_cost_and_failures() -> None:
    assert best_interval_seconds(2.0, 3600.0) == 120.0
    assert expect_failure_seconds(3600.0, 0.0, 0) == 3600.0
    assert expect_failure_seconds(3600.0, 3600.0, 3) == 1800.0
    due, _ = due_steps(1000, 1.0, cost_seconds=0.5, every_seconds="auto", failure_seconds=3600.0)
    first, *others = [after - before for before, after in zip([0, *due], due, strict=False)]
    assert first == pytest.approx(84.0, abs=2)  # sqrt(2 * 1 * 3600): nothing was measured yet
    assert others == pytest.approx([60.0] * len(others), abs=8)


def found(step: int, loss: float | None = None) -> Found:
    now = datetime.now(UTC)
    commit = Commit(step=step, cursor=0, fingerprint="", time=now, files={}, loss=loss)
    return Found(f"step-{step}", commit, True, False)


def test_the_newest_and_the_best_are_kept() -> None:
    all_of_them = [found(1, 0.5), found(2, 0.1), found(3, 0.4), found(4, 0.3), found(5)]
    assert choose_kept(all_of_them, 2, best=True) == {"step-2", "step-4", "step-5"}
    assert choose_kept(all_of_them, 2, best=False) == {"step-4", "step-5"}
    assert choose_kept([found(5)], 2, best=True) == {"step-5"}


def test_a_difference_is_said_by_field() -> None:
    there = {"manifest": "a" * 64, "train": {"seed": 1, "optimizer": {"lr": 0.1}, "model": {}}}
    here = {"manifest": "b" * 64, "train": {"seed": 1, "optimizer": {"lr": 0.2}, "steps": 5}}
    said = explain_difference(there, here)
    assert "manifest is bbbbbbbbbbbb and was aaaaaaaaaaaa" in said
    assert "train.optimizer.lr is 0.2 and was 0.1" in said
    assert "train.steps is 5 and was nothing" in said
    assert "seed" not in said
    assert explain_difference({}, here) == ""
