"""Replicas that die in a hot world: the others go on, and the result is that of no death at all.

One training in three replicas meets in turn a kill in the middle of a step, a stop, and the death
of all. Its workload leaves what every forward pass saw: a digest of the parameters, and records.
"""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.training.test_kill import commits, processes, wait_until
from tests.workspaces import PARAMS, ROOT, Workspace, make_workspace
from training.config import TrainConfig
from training.errors import CheckpointError
from training.heartbeat import Beat, read_beats
from training.hot_order import clear_given_up, give_up, require_authority
from training.spec import SPEC_FILE, TrainSpec

STEPS = 200
BATCH = 24
TRAIN = PARAMS["train"] | {
    "steps": STEPS,
    "dims": {"dp_replicate": 3},
    "global_batch": BATCH,
    "checkpoint": {"every_steps": 10, "keep": 100},
    "log_every_steps": 10,
    "max_restarts": 10,
    "optimizer": {"name": "sgd", "lr": 0.05},
}

_TRACED = """
class _Traced(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))
        self.traces = None
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training and len(inputs) > 2:
            digest = hashlib.sha256()
            for parameter in self.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            if self.traces is None:
                self.traces = open(f"traces/{os.getpid()}", "a")
            seen = {"digest": digest.hexdigest(), "records": inputs[:, 2].int().tolist()}
            self.traces.write(json.dumps(seen) + "\\n")
            self.traces.flush()
            self.passes += 1
            time.sleep(0.0 if os.path.exists("hurry") else 0.25)
        return self.inner(inputs[:, :2])


def model(hidden=16):
    if os.path.exists("stall"):
        os.remove("stall")
        os.kill(os.getpid(), signal.SIGSTOP)
    return _Traced(hidden)
"""


def prepared(path: Path, recovery: Mapping[str, Any]) -> Workspace:
    workspace = make_workspace(path, train=TRAIN | {"recovery": dict(recovery)})
    (workspace.path / "traces").mkdir()
    module = workspace.path / "toy_workload.py"
    text = module.read_text()
    head, _, rest = text.partition("def model(")
    rest = rest[rest.index("def collate(") :]
    rest = rest.replace('r["b"]] for r', 'r["b"], r["number"] if "number" in r else 0] for r')
    imports = "import csv, hashlib, json, os, signal, time\nimport torch\nfrom torch import nn\n"
    module.write_text(head.replace("import csv\n", imports) + _TRACED + "\n\n" + rest)
    for stage in ("ingest", "shard", "upload"):
        workspace.run("convoy", "stage", stage)
    return workspace


def settled(workspace: Workspace, num_steps: int = 3, num_replicas: int = 3) -> dict[int, Beat]:
    """All replicas, when each of them has made some steps more."""
    first: dict[int, int] = {}

    def look() -> dict[int, Beat] | None:
        beats = [b for run in workspace.path.glob(".convoy/runs/*") for b in read_beats(run)]
        for beat in beats:
            if beat.step:
                first.setdefault(beat.pid, beat.step)
        done = [b for b in beats if b.step >= first.get(b.pid, STEPS) + num_steps]
        return {beat.rank: beat for beat in done} if len(done) == num_replicas else None

    found: dict[int, Beat] = wait_until(look, 300)
    return found


def read_curve(workspace: Workspace) -> list[dict[str, float]]:
    [log] = workspace.path.glob(".convoy/runs/*/steps.jsonl")
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_others_go_on_and_nothing_is_lost(tmp_path: Path) -> None:
    undisturbed = prepared(tmp_path / "undisturbed", {"mode": "restart"})
    (undisturbed.path / "hurry").touch()
    undisturbed.run("convoy", "stage", "train")
    workspace = prepared(tmp_path / "hot", {"mode": "hot"})
    stage = workspace.start("convoy", "stage", "train")
    began = settled(workspace)

    os.kill(began[1].pid, signal.SIGKILL)
    killed = settled(workspace)
    assert {r for r in range(3) if killed[r].pid == began[r].pid} == {0, 2}

    os.kill(killed[0].pid, signal.SIGSTOP)
    stopped = settled(workspace)
    assert {r for r in range(3) if stopped[r].pid == killed[r].pid} == {1, 2}

    wait_until(lambda: commits(workspace))
    for beat in stopped.values():
        os.kill(beat.pid, signal.SIGKILL)
    restarted = settled(workspace)
    assert not {b.pid for b in restarted.values()} & {b.pid for b in stopped.values()}

    (workspace.path / "hurry").touch()
    output, _ = stage.communicate(timeout=300)
    assert stage.returncode == 0, output
    assert processes(workspace) == []
    report = workspace.read_json("artifacts/train/report.json")
    causes = [(i["cause"], i["rank"]) for i in report["incidents"]]
    assert causes[:2] == [("killed", 1), ("hang", 0)]
    assert {cause for cause, _ in causes[2:]} == {"killed"}
    assert [i["steps_lost"] for i in report["incidents"][:2]] == [0, 0]
    assert report["stretches"][-1]["kind"] == "ending"

    # Each line once, and the curve and the end of a training in which nobody died.
    mine, theirs = read_curve(workspace), read_curve(undisturbed)
    assert [line["step"] for line in mine] == [line["step"] for line in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    code = (
        "from safetensors.torch import load_file; import sys;"
        "a, b = (load_file(f'{p}/artifacts/train/model.safetensors') for p in sys.argv[1:]);"
        "print(max((a[n] - b[n]).abs().max().item() for n in a))"
    )
    paths = str(undisturbed.path), str(workspace.path)
    difference = workspace.run("python", "-c", code, *paths)
    assert float(difference.split()[-1]) < 1e-5
    num_again = report["incidents"][-1]["steps_lost"]
    check_batches(read_passes(undisturbed), read_passes(workspace), num_again)


def test_a_newcomer_or_a_lighthouse_that_is_stopped_is_replaced(tmp_path: Path) -> None:
    recovery = {"mode": "hot", "patience_seconds": 10, "exclude_seconds": 1}
    workspace = prepared(tmp_path / "stopped", recovery)
    workspace.set("train.dims.dp_replicate", 2)
    workspace.set("train.steps", 80)
    workspace.set("train.nodes", 2)
    workspace.set("train.min_nodes", 2)  # nobody goes on without the newcomer
    stage = workspace.start("convoy", "stage", "train")
    began = settled(workspace, 1, 2)

    (workspace.path / "stall").touch()
    os.kill(began[1].pid, signal.SIGKILL)
    wait_until(lambda: not (workspace.path / "stall").exists())
    healed = wait_until(lambda: (b := settled(workspace, 1, 2))[1].pid != began[1].pid and b, 300)
    assert healed[0].pid == began[0].pid

    [meeting] = processes(workspace, "convoy-meeting")
    meeting.suspend()
    wait_until(lambda: settled(workspace, 1, 2)[0].pid != began[0].pid, 300)

    (workspace.path / "hurry").touch()
    output, _ = stage.communicate(timeout=300)
    assert stage.returncode == 0, output
    incidents = workspace.read_json("artifacts/train/report.json")["incidents"]
    said = [i["message"] for i in incidents if i["cause"] == "hang"]
    assert "rank 1 makes no progress and has come to no step" in said[0]
    assert "replicas meet at is stopped" in said[-1]
    assert [line["step"] for line in read_curve(workspace)] == list(range(10, 81, 10))


def read_passes(workspace: Workspace) -> list[list[list[int]]]:
    """For all parameters that ever were, bit for bit: the records that each process last saw with
    them."""
    passes: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for trace in (workspace.path / "traces").iterdir():
        for line in trace.read_text().splitlines():
            seen = json.loads(line)
            passes[seen["digest"]][trace.name] = seen["records"]
    return [list(parts.values()) for parts in passes.values()]


def join(parts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted(record for part in parts for record in part))


def check_batches(calm: list[list[list[int]]], hot: list[list[list[int]]], num_again: int) -> None:
    """Each step was made once with its whole batch, by replicas that had the same bits."""
    expected = {join(parts) for parts in calm}
    assert len(calm) == len(expected) == STEPS
    # Those that the restart of all made again from a commit may have other bits then.
    assert STEPS <= len(hot) <= STEPS + num_again + 1
    made = []
    for parts in hot:
        # Some only began the step, which was made without them.
        some = (join(them) for n in range(len(parts)) for them in combinations(parts, n + 1))
        made.append(next((batch for batch in some if batch in expected), None))
    assert set(made) - {None} == expected
    assert made.count(None) <= 1  # the one in which all were killed


def set_train(**changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(TRAIN | {"recovery": {"mode": "hot"}} | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dims": {"dp_replicate": 1}}, "dims.dp_replicate"),
        ({"dims": {"dp_replicate": 3, "tp": 2}}, "whole copies"),
        ({"synchronize": {"mode": "diloco"}}, "synchronize.mode diloco"),
        ({"synchronize": {"compress": "fp16"}}, "synchronize.compress fp16"),
        ({"on_nonfinite": "roll_back"}, "on_nonfinite roll_back"),
        ({"profile": 3}, "profile 3"),
        (
            {"reproducible": True, "dims": {"dp_replicate": 2}, "global_batch": 32},
            "reproducible",
        ),
    ],
)
def test_what_hot_cannot_do_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        set_train(**changes)


def test_the_fewest_replicas_are_those_of_the_fewest_nodes() -> None:
    assert set_train(nodes=3).least_replicas == 1
    assert set_train(nodes=3, min_nodes=2).least_replicas == 2
    assert set_train(nodes=3, dims={"dp_replicate": 6}, min_nodes=2).least_replicas == 4


def test_a_replica_that_was_given_up_commits_nothing(tmp_path: Path) -> None:
    (tmp_path / SPEC_FILE).write_text('{"fencing_token": 4}')
    spec = TrainSpec.model_construct(run_directory=tmp_path, fencing_token=4, life=2)
    require_authority(spec, "checkpoint a")
    give_up(tmp_path, 1)
    require_authority(spec, "checkpoint a")
    give_up(tmp_path, 2)
    with pytest.raises(CheckpointError, match="checkpoint a is not committed: this replica"):
        require_authority(spec, "checkpoint a")
    clear_given_up(tmp_path)
    (tmp_path / SPEC_FILE).write_text('{"fencing_token": 5}')
    with pytest.raises(CheckpointError, match="a later world"):
        require_authority(spec, "checkpoint a")


def test_what_trains_in_restart_mode_loads_no_torchft() -> None:
    modules = "supervisor, training.node, training.agent, training.worker, training.trainer"
    code = f"import sys; import training.{modules}; print('torchft' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["False"]
