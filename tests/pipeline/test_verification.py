"""`convoy verify resume` on the toy workload: with real worker processes, really killed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.arguments import build_parser
from flows.commands import verify
from pipeline import verification
from pipeline.errors import ConfigError
from tests.pipeline.conftest import contents, edit, work
from tests.workspaces import Workspace
from training.resume_plan import ResumeCase

__all__ = ["work"]


_TP_PLAN = """

def tp_plan(model, degree):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"0": ColwiseParallel(), "3": RowwiseParallel()}
"""


def verify_resume(*arguments: str) -> int:
    return verify.main(build_parser().parse_args(["verify", "resume", *arguments]))


def test_a_resumed_run_ends_as_an_undisturbed_one(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents()
    assert verify_resume("--json", "--steps", "24", "--seed", "5") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["passed"]
    same, mixed, other = answer["findings"]
    assert [one["name"] for one in answer["findings"]] == [
        "same workers",
        "mixed precision",
        "other workers",
    ]
    assert set(same["covers"]) == {"an epoch's end", "dropout", "a schedule"}
    assert set(mixed["covers"]) == {*same["covers"], "mixed precision", "accumulation"}
    assert ", part 2" in mixed["kills"][2]
    assert same["num_tensors"] == 16  # 4 parameters, each with 3 tensors of AdamW
    assert [" in step " in kill for kill in same["kills"]] == [True, False]
    assert " while saving step " in same["kills"][1]
    assert other["layout"] == "dp_replicate 2, then one worker"
    assert 0 < other["largest_loss_difference"] < other["loss_tolerance"]
    assert contents() == before
    assert list((work.path / verification.SCRATCH).iterdir()) == []
    assert not (work.path / ".convoy/mlflow.db").exists()


def test_one_that_depends_on_its_process_is_found(
    work: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(
        Path("toy_workload.py"),
        "    return cross_entropy(output, target)",
        "    import os\n    return cross_entropy(output, target) * (1 + os.getpid() % 1000 / 1e6)",
    )
    plan_cases: Callable[..., list[ResumeCase]] = verification.plan_cases

    def plan_one(*arguments: Any, **named: Any) -> Sequence[ResumeCase]:
        return plan_cases(*arguments, **named)[:1]

    monkeypatch.setattr(verification, "plan_cases", plan_one)
    assert verify_resume("--steps", "16", "--seed", "1") == 1
    said = capsys.readouterr().out
    assert "FAIL" in said
    assert "differ: steps 1, 2, 3 and 13 more" in said


def check(capsys: pytest.CaptureFixture[str], *names: str) -> list[dict[str, Any]]:
    """What is found in these cases."""
    plan_cases: Callable[..., list[ResumeCase]] = verification.plan_cases

    def plan(*arguments: Any, **named: Any) -> list[ResumeCase]:
        return [c for c in plan_cases(*arguments, **named) if c.name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "plan_cases", plan)
        assert verify_resume("--json", "--steps", "16", "--seed", "3") == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["findings"]
    return found


def test_virtual_ranks_at_two_sizes(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    work.set("train.reproducible", True)
    work.set("train.virtual_ranks", 4)
    same, other = check(capsys, "same workers", "other workers")
    assert ", part 2" in same["kills"][2]  # between two virtual ranks
    assert "virtual ranks" in same["covers"]
    # The same bits with half of the workers, dropout included.
    assert (other["layout"], other["loss_tolerance"]) == ("dp_replicate 2, then one worker", 0.0)
    assert (other["largest_loss_difference"], other["num_tensors"]) == (0.0, 16)


def test_diloco_between_two_averages(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    way = {"mode": "diloco", "every_steps": 32, "num_fragments": 2, "overlap_steps": 1}
    work.set("train.synchronize", way)
    [same] = check(capsys, "same workers", "other workers")  # of which there is no such
    assert "diloco" in same["covers"]


def test_layers_that_are_split(work: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    module = Path("toy_workload.py")
    module.write_text(module.read_text() + _TP_PLAN)
    work.set("train.dims", {"dp_replicate": 1, "tp": 2})
    [same] = check(capsys, "same workers")
    assert (same["layout"], same["num_tensors"]) == ("tp 2", 16)


def test_asynchronous_workers_are_refused(work: Workspace) -> None:
    work.set("train.synchronize", {"mode": "asynchronous"})
    with pytest.raises(ConfigError, match="no two runs are equal"):
        verify_resume()


def test_too_few_steps(work: Workspace) -> None:
    with pytest.raises(ConfigError, match="--steps 3: take 16 or more"):
        verify_resume("--steps", "3")
