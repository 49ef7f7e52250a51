"""A training that is killed goes on from its last commit and ends with the same bits."""

import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workspaces import PARAMS, Workspace, make_workspace, upload_shards
from training.tracking import open_client, read_runs

# MLflow's, of its libraries
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TRAIN = PARAMS["train"] | {
    "steps": 800,
    "checkpoint": {"every_steps": 100, "keep": 2},
    "log_every_steps": 50,
    "system_metrics_seconds": 0.2,
}
WEIGHTS = "artifacts/train/model.safetensors"


def prepared(path: Path) -> Workspace:
    workspace = make_workspace(path, train=TRAIN)
    upload_shards(workspace)
    return workspace


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def processes(workspace: Workspace, name: str = "convoy-") -> list[psutil.Process]:
    """The nodes, agents and ranks that run in the workspace."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith(name) and process.cwd() == str(workspace.path):
                found.append(process)
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue
    return found


def commits(workspace: Workspace) -> list[Path]:
    return sorted(workspace.path.glob(".convoy/runs/*/checkpoints/step-*/committed.json"))


def tracking_uri(workspace: Workspace) -> str:
    return f"sqlite:///{workspace.path}/.convoy/mlflow.db"


def mlflow_statuses(workspace: Workspace) -> list[str]:
    return [run.status for run in read_runs(tracking_uri(workspace), "convoy")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = prepared(tmp_path_factory.mktemp("undisturbed") / "w")
    workspace.run("convoy", "stage", "train")
    return workspace


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return prepared(tmp_path_factory.mktemp("disturbed") / "w")


def test_killed_and_terminated_and_called_again(
    undisturbed: Workspace, disturbed: Workspace
) -> None:
    stage = disturbed.start("convoy", "stage", "train")
    first = wait_until(lambda: commits(disturbed))
    stage.kill()
    stage.communicate(timeout=30)
    wait_until(lambda: not processes(disturbed), 30)  # nobody survives the stage
    assert mlflow_statuses(disturbed) == ["RUNNING"]  # nobody was left to say so

    stage = disturbed.start("convoy", "stage", "train")
    wait_until(lambda: set(commits(disturbed)) - set(first))
    stage.send_signal(signal.SIGTERM)
    stage.communicate(timeout=30)
    assert stage.returncode == 128 + signal.SIGTERM
    assert processes(disturbed) == []
    assert mlflow_statuses(disturbed) == ["KILLED"]

    output = disturbed.run("convoy", "stage", "train")
    assert "resumed from a checkpoint" in output
    assert mlflow_statuses(disturbed) == ["FINISHED"]
    assert disturbed.read(WEIGHTS) == undisturbed.read(WEIGHTS)
    assert disturbed.read("artifacts/train/loss.csv") == undisturbed.read(
        "artifacts/train/loss.csv"
    )
    # The call that was killed is in the account of the one that came to the end; the one that was
    # ended in order lost nothing but the time to start again.
    report = disturbed.read_json("artifacts/train/report.json")
    [incident] = report["incidents"]
    assert "the process that trains was ended in step" in incident["message"]
    assert 0 < incident["steps_lost"] < 200
    stretches = report["stretches"]
    assert [s["kind"] for s in stretches if s["kind"] != "ending"] == [
        *("starting", "training", "recovering", "training", "starting", "training")
    ]
    assert [s["begins"] for s in stretches[1:]] == [s["ends"] for s in stretches[:-1]]
    goodput = report["goodput"]
    assert sum(goodput.values()) == pytest.approx(stretches[-1]["ends"])
    assert goodput["lost_seconds"] > 0 < goodput["recovery_seconds"]
    logged = open_client(tracking_uri(disturbed)).get_run(report["mlflow_run_id"]).data.metrics
    assert logged["goodput"] == pytest.approx(goodput["training_seconds"] / sum(goodput.values()))
    with closing(sqlite3.connect(disturbed.path / ".convoy/mlflow.db")) as database:
        sampled = "SELECT value FROM metrics WHERE key = 'system/ranks_memory_megabytes'"
        assert max(value for (value,) in database.execute(sampled)) > 100  # of two ranks with torch


def test_a_killed_worker_is_started_again_in_the_same_call(
    undisturbed: Workspace, tmp_path: Path
) -> None:
    workspace = prepared(tmp_path / "w")
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: commits(workspace))
    [victim] = wait_until(lambda: processes(workspace, "convoy-rank-1"))
    victim.kill()
    output, _ = stage.communicate(timeout=180)
    assert stage.returncode == 0, output
    assert "survived: rank 1 was ended by SIGKILL" in output
    [incident] = workspace.read_json("artifacts/train/report.json")["incidents"]
    assert (incident["cause"], incident["rank"]) == ("killed", 1)
    assert workspace.read(WEIGHTS) == undisturbed.read(WEIGHTS)
    assert processes(workspace) == []


def test_the_first_ranks_own_error_is_shown_and_its_text_stays_here(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "w")
    module = workspace.path / "toy_workload.py"
    module.write_text(
        module.read_text().replace(
            "    return cross_entropy(output, target)",
            "    import os\n    if os.environ['RANK'] == '1':\n"
            "        raise ValueError('secret-of-a-record')\n"
            "    return cross_entropy(output, target)",
        )
    )
    upload_shards(workspace)
    output = workspace.run("convoy", "stage", "train", expect=1)
    assert (
        "error: rank 1 failed: toy_workload.loss() raised ValueError at toy_workload.py:" in output
    )
    error = output[output.index("error: ") :]
    assert "secret-of-a-record" not in error  # what goes elsewhere
    assert "secret-of-a-record" in output  # the terminal of this machine has the traceback
    assert mlflow_statuses(workspace) == ["FAILED"]
    assert not (workspace.path / "artifacts/train").exists()


def test_a_stopped_rank_is_named_and_the_training_goes_on(
    undisturbed: Workspace, tmp_path: Path
) -> None:
    workspace = prepared(tmp_path / "w")
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: commits(workspace))
    [victim] = wait_until(lambda: processes(workspace, "convoy-rank-1"))
    victim.suspend()
    output, _ = stage.communicate(timeout=180)
    assert stage.returncode == 0, output
    assert "survived: rank 1 is stopped in " in output
    [incident] = workspace.read_json("artifacts/train/report.json")["incidents"]
    assert (incident["cause"], incident["rank"]) == ("hang", 1)
    [stacks] = workspace.path.glob(".convoy/runs/*/logs/hang-1.txt")
    # The one that waits says where; the one that is stopped cannot.
    assert "rank 0:" in stacks.read_text()
    assert "trainer.py" in stacks.read_text()
    assert "rank 1:" not in stacks.read_text()
    assert workspace.read(WEIGHTS) == undisturbed.read(WEIGHTS)
    assert processes(workspace) == []


def test_a_lost_node_and_then_another(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "min_nodes": 1, "max_restarts": 1, "steps": 100_000}
    recovery = {"recovery": {"exclude_seconds": 600.0}}
    workspace = make_workspace(tmp_path / "w", train=TRAIN | nodes | recovery)
    upload_shards(workspace)
    stage = workspace.start("convoy", "stage", "train")
    first = wait_until(lambda: commits(workspace))
    assert len(processes(workspace, "convoy-node")) == 2
    processes(workspace, "convoy-node")[1].kill()
    # One is left: it goes on with one replica, as the other stays excluded.
    wait_until(lambda: len(processes(workspace, "convoy-rank")) == 1)
    wait_until(lambda: set(commits(workspace)) - set(first))
    [rank] = processes(workspace, "convoy-rank")
    rank.kill()
    output, _ = stage.communicate(timeout=120)
    assert stage.returncode == 1
    assert "the workers were ended 2 times, more than train.max_restarts 1 allows" in output
    assert "node_lost: node 1 was lost in step " in output
    assert "killed: rank 0 was ended by SIGKILL in step " in output
    assert "`convoy stage train` goes on from it" in output
    assert processes(workspace) == []
