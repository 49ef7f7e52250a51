"""A run that loses a node goes on without it, and grows again when the node is back."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_kill import commits, processes, wait_until
from tests.workspaces import PARAMS, Workspace, make_workspace, upload_shards

STEPS = 400
TOLERANCE = 1e-3
"""Of a step's loss, relative: with other replicas the same sum is rounded in another order."""
TRAIN = PARAMS["train"] | {
    "steps": STEPS,
    "global_batch": 24,
    "checkpoint": {"every_steps": 25, "keep": 2},
    "log_every_steps": 1,
}
_SEEING = """
import json
import os
import time

class Seeing(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.world = None

    def forward(self, x):
        if self.world is None:
            [spec] = Path(".convoy").rglob("spec.json")
            self.world = json.loads(spec.read_bytes())["fencing_token"]
        if self.training and len(x) > 2:  # the rehearsal has two
            with open(f"seen/{self.world}-{os.environ['RANK']}", "a") as file:
                file.write(json.dumps(sorted(map(int, x[:, 2]))) + "\\n")
        time.sleep(float(Path("pace").read_text()))
        return self.net(x[:, :2])

def model(hidden=16):
    return Seeing(hidden)
"""


def seeing_workspace(path: Path, **train: Any) -> Workspace:
    """Prepared up to the training, whose ranks write down the samples that they see."""
    workspace = make_workspace(path, train=TRAIN | train)
    module = workspace.path / "toy_workload.py"
    text = module.read_text()
    text = text.replace('[[r["a"], r["b"]]', '[[r["a"], r["b"], r.get("number", 0)]')
    module.write_text(text.replace("if TYPE_CHECKING:", "if True:") + _SEEING)
    (workspace.path / "seen").mkdir()
    set_pace(workspace, 0.0)
    upload_shards(workspace)
    return workspace


def set_pace(workspace: Workspace, seconds: float) -> None:
    """Have each step take that much longer: a run must not end before its nodes are back."""
    pending = workspace.path / "pace.tmp"
    pending.write_text(str(seconds))
    pending.rename(workspace.path / "pace")


def read_samples(workspace: Workspace, firsts: list[int]) -> dict[int, list[int]]:
    """What each step trained on, by the worlds that began with these steps and committed them."""
    samples: dict[int, list[int]] = {}
    for world, first in enumerate(firsts, 1):
        ranks = [path.read_text().splitlines() for path in workspace.path.glob(f"seen/{world}-*")]
        end = [*firsts, STEPS + 1][world]
        for step in range(first, end):
            samples[step] = sorted(n for rank in ranks for n in json.loads(rank[step - first]))
    return samples


def read_losses(workspace: Workspace) -> list[float]:
    lines = workspace.read("artifacts/train/steps.jsonl").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    path = tmp_path_factory.mktemp("undisturbed") / "w"
    workspace = seeing_workspace(path, dims={"dp_replicate": 1})
    workspace.run("convoy", "stage", "train")
    return workspace


def test_three_nodes_then_two_then_three(undisturbed: Workspace, tmp_path: Path) -> None:
    nodes = {"dims": {"dp_replicate": 3}, "nodes": 3, "min_nodes": 2, "max_restarts": 1}
    workspace = seeing_workspace(tmp_path / "w", **nodes, recovery={"exclude_seconds": 1.0})
    set_pace(workspace, 0.3)
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: commits(workspace))
    processes(workspace, "convoy-node")[1].kill()
    wait_until(lambda: len(processes(workspace, "convoy-rank")) == 2)
    wait_until(lambda: len(processes(workspace, "convoy-rank")) == 3)
    set_pace(workspace, 0.0)
    output, _ = stage.communicate(timeout=240)
    assert stage.returncode == 0, output
    assert "train: the world of 2 nodes makes way for one of 3" in output
    report = workspace.read_json("artifacts/train/report.json")
    [incident] = report["incidents"]
    assert (incident["cause"], incident["node"]) == ("node_lost", 1)
    assert [notice["kind"] for notice in report["notices"]] == ["fewer_nodes", "more_nodes"]
    grown = report["notices"][1]
    assert 0 < grown["seconds_lost"] < 60
    firsts = [1, incident["last_step"] - incident["steps_lost"], grown["step"] + 1]
    samples = read_samples(workspace, firsts)
    assert samples == read_samples(undisturbed, [1])
    counts = Counter(number for batch in samples.values() for number in batch)
    assert max(counts.values()) - min(counts.values()) <= 1  # each once an epoch
    assert read_losses(workspace) == pytest.approx(read_losses(undisturbed), rel=TOLERANCE)
    assert processes(workspace) == []
