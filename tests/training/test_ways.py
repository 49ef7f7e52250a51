"""The trainer under every way to synchronise, on the toy workload, in ranks without torchrun."""

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import run_ranks
from tests.training.test_trainer import run
from tests.workspaces import Workspace
from training.spec import NONFINITE_FILE

STREAMING = {"mode": "diloco", "every_steps": 4, "num_fragments": 2, "overlap_steps": 1}
POWERSGD = {"compress": "powersgd", "powersgd_start_step": 3, "powersgd_rank": 1}

_EXCHANGING_MODEL = """

class Exchanging(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, inputs):
        import torch.distributed as dist

        mean = inputs.mean(0)
        dist.all_reduce(mean)
        return self.layers(inputs - mean / dist.get_world_size())


def model(hidden=16):
    return Exchanging(hidden)
"""


def train_here(path: Path, train: dict[str, Any]) -> list[dict[str, float]]:
    os.chdir(path)
    return run(Workspace(path, {}), **train)


def train(work: Workspace, num_workers: int, **settings: Any) -> list[dict[str, float]]:
    """Train in so many ranks; the logged steps."""
    settings = {"dims": {"dp_replicate": num_workers}} | settings
    first, *_ = run_ranks(num_workers, train_here, work.path, settings)
    assert isinstance(first, list)
    return first


def weights(work: Workspace, run: str = "run") -> str:
    return hashlib.sha256(work.read(f"{run}/model.safetensors")).hexdigest()


def forget(work: Workspace, after: int) -> None:
    """Leave the checkpoints up to a step, as if the run had been killed there."""
    import shutil

    shutil.rmtree(work.path / ".convoy/stores/eu/checkpoints", ignore_errors=True)
    (work.path / "run/model.safetensors").unlink()
    for path in (work.path / "run/checkpoints").iterdir():
        if int(path.name.split("-")[1]) > after:
            shutil.rmtree(path)


@pytest.mark.parametrize(
    "synchronize",
    [{"mode": "local_sgd", "every_steps": 4}, STREAMING, POWERSGD],
    ids=["local_sgd", "streaming", "powersgd"],
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    work: Workspace, synchronize: dict[str, Any]
) -> None:
    checkpoint = {"every_steps": 10, "keep": 9, "store": False}
    settings = {"synchronize": synchronize, "checkpoint": checkpoint}
    lines = train(work, 2, **settings)
    assert lines[-1]["loss"] < lines[0]["loss"]
    whole = weights(work)
    forget(work, 10)
    assert [line["step"] for line in train(work, 2, **settings)] == [15, 20, 25, 30]
    assert weights(work) == whole


def test_reproducible_gives_the_same_bits_at_any_size_and_after_a_change_of_it(
    work: Workspace,
) -> None:
    checkpoint = {"every_steps": 10, "keep": 9, "store": False}
    settings = {"reproducible": True, "checkpoint": checkpoint, "global_batch": 32}
    losses = [line["loss"] for line in train(work, 4, **settings)]
    whole = weights(work)
    forget(work, 20)
    assert [line["loss"] for line in train(work, 1, **settings)] == losses[4:]
    assert weights(work) == whole
    forget(work, 10)
    train(work, 2, **settings)
    assert weights(work) == whole


def test_asynchronous_uses_each_batch_once_and_says_how_stale(work: Workspace) -> None:
    way = {"mode": "asynchronous", "every_steps": 8, "max_staleness": 2}
    checkpoint = {"every_steps": 10, "keep": 9, "store": False}
    lines = train(work, 2, synchronize=way, checkpoint=checkpoint)
    # A line where all meet, and a checkpoint where one was due since they did so before.
    assert [line["step"] for line in lines] == [8, 16, 24, 30]
    assert [line["num_steps"] for line in lines] == [8, 8, 8, 6]
    assert max(line["staleness_max"] for line in lines) <= 2
    names = sorted(path.name for path in (work.path / "run/checkpoints").iterdir())
    assert [int(name.split("-")[1]) for name in names] == [16, 24, 30]
    forget(work, 16)
    assert [line["step"] for line in train(work, 2, synchronize=way, checkpoint=checkpoint)] == [
        *(24, 30)
    ]
    own = [json.loads(line) for line in work.read("run/steps-1.jsonl").splitlines()]
    assert [line["step"] for line in own] == [8, 16, 24, 30]


def test_a_forward_pass_that_exchanges_something(work: Workspace) -> None:
    """Also in the rehearsal before the first step, which one rank alone would never end."""
    module = work.path / "toy_workload.py"
    module.write_text(
        module.read_text().replace("if TYPE_CHECKING:", "if True:") + _EXCHANGING_MODEL
    )
    lines = train(work, 2)
    assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
    assert lines[-1]["loss"] < lines[0]["loss"]


_SPOILED_LOSS = """

def loss(output, target):
    import os
    from torch.nn.functional import cross_entropy

    # The first call is the rehearsal's. One rank alone has the bad samples.
    loss.calls = getattr(loss, "calls", -1) + 1
    is_bad = os.environ["RANK"] == "1" and loss.calls in (14, 15)
    return cross_entropy(output, target) * (float("nan") if is_bad else 1)
"""


@pytest.mark.parametrize("kind", ["dp_replicate", "dp_shard"])
def test_all_ranks_leave_out_what_is_no_number_in_one(work: Workspace, kind: str) -> None:
    checkpoint = {"every_steps": 5, "keep": 9, "store": False}
    settings = {"checkpoint": checkpoint, "dims": {"dp_replicate": 1, kind: 2}}
    module = work.path / "toy_workload.py"
    usual = module.read_text()
    whole = train(work, 2, **settings)
    (work.path / "run").rename(work.path / "whole")
    module.write_text(usual + _SPOILED_LOSS)
    states = []
    for policy in ("skip", "roll_back"):
        lines = train(work, 2, on_nonfinite=policy, **settings)
        assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
        assert [line["loss"] for line in lines[:2]] == [line["loss"] for line in whole[:2]]
        assert all(math.isfinite(line["loss"]) for line in lines)
        left_out = map(json.loads, work.read(f"run/{NONFINITE_FILE}").splitlines())
        assert [(one["step"], one["action"]) for one in left_out] == [(14, policy), (15, policy)]
        states.append(weights(work))
        (work.path / "run").rename(work.path / policy)
    assert len({*states, weights(work, "whole")}) == 3
