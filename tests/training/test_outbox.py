"""An MLflow server that is away loses no metric and keeps no step waiting."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.prefect_api import wait_until
from tests.killable import KillableServer
from tests.training.test_kill import TRAIN
from tests.workspaces import Workspace, make_workspace, upload_shards
from training.outbox import Outbox, deliver_left
from training.tracking import end_run, open_client, start_run

# MLflow's, of its libraries
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableServer]:
    path = tmp_path_factory.mktemp("mlflow")
    command = [
        *("mlflow", "server", f"--backend-store-uri=sqlite:///{path}/mlflow.db"),
        *(f"--default-artifact-root={(path / 'artifacts').as_uri()}", "--no-serve-artifacts"),
        "--workers=1",
    ]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = KillableServer(command, "health", path / "log", environment)
    server.start()
    yield server
    server.close()


@pytest.fixture(scope="module")
def workspace(server: KillableServer, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    path = tmp_path_factory.mktemp("outbox") / "w"
    workspace = make_workspace(path, {"MLFLOW_TRACKING_URI": server.url}, train=TRAIN)
    workspace.set("train.steps", 1500)
    workspace.set("train.log_every_steps", 10)
    upload_shards(workspace)
    return workspace


def read_lines(workspace: Workspace) -> list[dict[str, float]]:
    """The newest step log."""
    logs = list(workspace.path.glob(".convoy/runs/*/steps.jsonl"))
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return [json.loads(line) for line in newest.read_bytes().splitlines()] if newest else []


def newest_run(server: KillableServer) -> Any:
    client = open_client(server.url)
    experiment = client.get_experiment_by_name("convoy")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id])[0]


def history(server: KillableServer, key: str) -> list[tuple[int, float]]:
    """Every value that MLflow has of a metric of the run, twice where it has it twice."""
    run_id = newest_run(server).info.run_id
    found = open_client(server.url).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def status(server: KillableServer) -> str:
    found: str = newest_run(server).info.status
    return found


def test_what_a_server_missed_it_has_in_the_end(
    server: KillableServer, workspace: Workspace
) -> None:
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: len(read_lines(workspace)) > 3)
    server.kill()
    before = len(read_lines(workspace))
    wait_until(lambda: len(read_lines(workspace)) > before + 5, 30)  # no step waits for it

    # The stage is killed while it is away: what was not sent is left to the next one.
    stage.kill()
    stage.communicate(timeout=30)
    server.start()
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: len(read_lines(workspace)) > before + 10)
    server.kill()
    output, _ = stage.communicate(timeout=200)
    assert stage.returncode == 0, output
    assert "sends it" in output
    workspace.run("convoy", "stage", "evaluate")

    server.start()
    assert status(server) == "RUNNING"
    assert "told what it had missed of 1 run" in workspace.run("convoy", "reconcile")
    assert status(server) == "FINISHED"
    lines = read_lines(workspace)
    assert history(server, "loss") == [(int(line["step"]), line["loss"]) for line in lines]
    assert len(history(server, "holdout.accuracy")) == 1
    assert not list((workspace.path / ".convoy/outbox").iterdir())


def test_a_stopped_server_does_not_keep_a_cancelled_training(
    server: KillableServer, workspace: Workspace
) -> None:
    workspace.set("train.seed", 9)
    stage = workspace.start("convoy", "stage", "train")
    wait_until(lambda: 3 < len(read_lines(workspace)) < 100)
    family = psutil.Process(stage.pid).children(recursive=True)
    with server.stopped():
        began = time.monotonic()
        stage.send_signal(signal.SIGTERM)
        stage.communicate(timeout=30)
        _, alive = psutil.wait_procs(family, 1)
        assert not alive
        assert time.monotonic() - began < 10
    assert status(server) == "RUNNING"
    workspace.run("convoy", "reconcile")
    assert status(server) == "KILLED"


def test_nothing_is_told_twice_whoever_dies_between(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_id = start_run(uri, "convoy", tmp_path.as_uri(), "x", {}, {})
    outbox = Outbox(tmp_path, run_id)
    for step in range(1500):
        outbox.note_metrics({"loss": 1.0 / (step + 1), "lr": 0.1}, step)
    outbox.deliver(uri)
    outbox.close()
    (tmp_path / f"{run_id}.sent").write_text("0")  # killed before it was noted
    with (tmp_path / f"{run_id}.jsonl").open("a") as file:
        file.write('{"metrics": {"lo')  # killed in mid-word
    outbox = Outbox(tmp_path, run_id)
    assert outbox.last_step == 1499
    outbox.note_end("FINISHED")
    with pytest.raises(BlockingIOError):
        Outbox(tmp_path, run_id, wait=False)
    assert deliver_left(tmp_path, uri) == 0  # another has it
    outbox.close()
    assert deliver_left(tmp_path, uri) == 1
    client = open_client(uri)
    assert len(client.get_metric_history(run_id, "loss")) == 1500
    assert client.get_run(run_id).info.status == "FINISHED"
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_run_that_was_made_and_not_noted_is_found_again(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    made = [start_run(uri, "convoy", tmp_path.as_uri(), "x", {}, {}, mark="m") for _ in range(2)]
    other = start_run(uri, "convoy", tmp_path.as_uri(), "x", {}, {}, mark="n")
    assert made[0] == made[1] != other
    assert end_run(uri, other, "FINISHED")
