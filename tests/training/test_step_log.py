"""The log of steps: what its lines say of all ranks and of each, and how a resumed run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import run_ranks
from training.phases import OTHER, PHASES
from training.timing import StepTimer

_SPLIT = [f"{name}_seconds" for name in (*PHASES, OTHER)]


def _log_two_lines(directory: Path, resumed_step: int) -> None:
    """Rank 1 computes for three seconds a step while rank 0 computes for one and waits for two."""
    import torch
    import torch.distributed as dist

    from training.step_log import StepLog

    now = 0.0
    timer = StepTimer(lambda: now)
    rank = dist.get_rank()
    log = StepLog(directory, resumed_step, timer, torch.device("cpu"), 2)
    for step in range(resumed_step + 1, resumed_step + 5):
        with timer.phase("backward"):
            now += 3.0 if rank else 1.0
        with timer.phase("communication"):
            now += 0.0 if rank else 2.0
        now += 0.5
        log.add(torch.tensor(float(step + rank)), torch.zeros(4, 7))
        if step % 2 == 0:
            log.write(step, 0.1, 2.0, 8)
    log.close()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    run_ranks(2, _log_two_lines, directory, 0)
    return directory


def test_a_line_is_the_mean_of_steps_and_ranks(logged: Path) -> None:
    first, second = _read(logged / "steps.jsonl")
    assert (first["step"], second["step"]) == (2, 4)
    assert (first["loss"], second["loss"]) == (2.0, 4.0)
    assert (first["lr"], first["grad_norm"]) == (0.1, 2.0)
    assert first["step_seconds"] == 3.5 == sum(first[name] for name in _SPLIT)
    assert (first["backward_seconds"], first["communication_seconds"]) == (2.0, 1.0)
    assert first["samples_per_second"] == 8 / 3.5
    assert first["tokens_per_second"] == 8 * 7 / 3.5
    assert first["peak_rss_bytes"] > 1 << 20


def test_the_slowest_rank_is_the_one_that_worked_longest(logged: Path) -> None:
    assert [line["slowest_rank"] for line in _read(logged / "steps.jsonl")] == [1, 1]
    assert _read(logged / "steps.jsonl")[0]["slowest_busy_seconds"] == 3.5


def test_each_rank_has_its_own_lines(logged: Path) -> None:
    for rank, (backward, communication) in enumerate([(1.0, 2.0), (3.0, 0.0)]):
        lines = _read(logged / f"steps-{rank}.jsonl")
        assert [line["step"] for line in lines] == [2, 4]
        assert [line["loss"] for line in lines] == [1.5 + rank, 3.5 + rank]
        assert lines[0]["rank"] == rank
        assert lines[0]["backward_seconds"] == backward
        assert lines[0]["communication_seconds"] == communication


def test_a_resumed_run_goes_on_in_its_files(logged: Path, tmp_path: Path) -> None:
    for path in logged.iterdir():
        text = path.read_text()
        (tmp_path / path.name).write_text(text + text[: len(text) // 3])  # a kill cut the last
    (tmp_path / "steps-2.jsonl").write_text("{}\n")  # of a larger world
    run_ranks(2, _log_two_lines, tmp_path, 2)
    for name in ("steps.jsonl", "steps-0.jsonl", "steps-1.jsonl"):
        assert [line["step"] for line in _read(tmp_path / name)] == [2, 4, 6]
    assert not (tmp_path / "steps-2.jsonl").exists()
