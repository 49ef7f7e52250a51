"""A flow run whose process, worker or machine died is Crashed, and the next one goes on with it."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.flows.convoy_up import find_processes, read_statuses
from tests.flows.pacing import make_paced
from tests.flows.prefect_api import PrefectApi, wait_until
from tests.killable import KillableServer
from tests.workspaces import Workspace, make_workspace

STEPS = 400
AWAY_SECONDS = float(os.environ.get("CONVOY_AWAY_SECONDS", "20"))


class Served:
    """A workspace whose deployment is served, by a worker that can be killed and started again."""

    def __init__(self, workspace: Workspace, server: KillableServer) -> None:
        self.workspace = workspace
        self.server = server
        self.pace = make_paced(workspace)
        self.process = workspace.start("convoy", "serve")
        self.api = PrefectApi(f"{server.url}/api", "toy")

    def serve_again(self) -> None:
        self.process.communicate(timeout=30)
        self.api.deployment = self.api.get("deployments/name/train/toy")
        self.process = self.workspace.start("convoy", "serve")

    def set_seed(self, seed: int) -> None:
        """Once no run is at work, which would find that params.yaml was changed meanwhile."""
        busy = {"RUNNING", "PENDING"}
        known = ("lost",)  # a run that only seems to be
        wait_until(
            lambda: (
                not [
                    run
                    for run in self.api.runs()
                    if run["state_type"] in busy and run["name"] not in known
                ]
            )
        )
        self.workspace.set("train.seed", seed)

    def start(self, **parameters: Any) -> str:
        """Ask for a run and wait until its training has something to go on from.

        It is slow until it is let free, so that it is at work for as long as a test needs.
        """
        self.pace.slow()
        run_id = self.api.start(**parameters)
        wait_until(lambda: self.api.tasks(run_id).get("train"))
        before = self._commits()
        wait_until(lambda: self._commits() - before)
        return run_id

    def _commits(self) -> set[Path]:
        return set(self.workspace.path.glob(".convoy/runs/*/checkpoints/step-*/committed.json"))

    def num_steps(self) -> int:
        """Lines in the newest step log."""
        logs = self.workspace.path.glob(".convoy/runs/*/steps.jsonl")
        newest = max(logs, key=lambda path: path.stat().st_mtime)
        return len(newest.read_bytes().splitlines())

    def set_state(self, run_id: str, state: str, message: str, *, force: bool = False) -> None:
        content = {"type": state, "name": state.capitalize(), "message": message}
        answer = self.api.post(
            f"flow_runs/{run_id}/set_state", {"state": content, "force": force}
        ).json()
        assert answer["status"] == "ACCEPT", answer

    def process_of(self, run_id: str) -> psutil.Process:
        labels = self.api.get(f"flow_runs/{run_id}")["labels"]
        return psutil.Process(labels["convoy.pid"])

    def automations(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.api.post("automations/filter", {}).json()
        return found

    def successors(self, run_id: str) -> list[dict[str, Any]]:
        return [run for run in self.api.runs() if run["parameters"].get("continues") == run_id]

    def successor(self, run_id: str, seconds: float = 90.0) -> str:
        [run] = wait_until(lambda: self.successors(run_id), seconds)
        found: str = run["id"]
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("prefect")
    command = ["prefect", "server", "start"]
    server = KillableServer(command, "api/health", home / "log", {"PREFECT_HOME": str(home)})
    server.start()
    workspace = make_workspace(
        tmp_path_factory.mktemp("lives") / "w",
        {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"{server.url}/api"},
        schedule={"cron": None, "retries": 0, "max_resubmissions": 1, "silence_seconds": 45},
    )
    workspace.set("train.steps", STEPS)
    workspace.set("train.checkpoint", {"every_steps": 10, "keep": 2})
    served = Served(workspace, server)
    yield served
    served.api.close()
    served.process.send_signal(signal.SIGTERM)
    served.process.communicate(timeout=60)
    server.close()
    assert not find_processes(workspace)


@pytest.fixture(scope="module")
def lost(served: Served) -> str:
    """A run whose machine went away: nobody here knows its process, and no heartbeat comes."""
    content = {"state": {"type": "PENDING"}, "name": "lost"}
    path = f"deployments/{served.api.deployment['id']}/create_flow_run"
    run_id: str = served.api.post(path, content).json()["id"]
    labels = {"machine": "elsewhere/1", "boot": "b", "pid": 1, "started_ticks": 1}
    for name, value in labels.items():
        served.api.patch(f"flow_runs/{run_id}/labels", {f"convoy.{name}": value})
    served.api.post(f"flow_runs/{run_id}/set_state", {"state": {"type": "RUNNING"}})
    return run_id


@pytest.mark.usefixtures("lost")
def test_a_killed_run_is_submitted_again_by_the_automation(served: Served) -> None:
    run_id = served.start()
    served.process_of(run_id).kill()
    served.pace.free()
    following = served.successor(run_id)
    assert served.api.state(run_id)["type"] == "CRASHED"
    assert served.api.finish(following)["type"] == "COMPLETED", served.api.state(following)
    report = served.workspace.read_json("artifacts/train/report.json")
    assert report["resumed"]
    tasks = served.api.tasks(following)
    assert "shard" not in tasks
    assert len(served.successors(run_id)) == 1
    assert "up to date" in served.workspace.run("dvc", "status")


def test_a_killed_worker_and_run_are_found_by_the_reconciler(served: Served) -> None:
    served.set_seed(8)
    run_id = served.start(force=True)
    victim = served.process_of(run_id)
    served.process.kill()
    victim.kill()
    wait_until(lambda: not find_processes(served.workspace), 30)
    assert served.api.state(run_id)["type"] == "RUNNING"  # nobody was left to say so
    served.serve_again()
    wait_until(lambda: served.api.state(run_id)["type"] == "CRASHED", 60)
    assert "is gone" in served.api.state(run_id)["message"]
    following = served.successor(run_id)
    wait_until(lambda: served.api.tasks(following).get("train"))
    assert "shard" not in served.api.tasks(following)  # it was forced, and done

    # The budget of one is used up by the next death.
    wait_until(lambda: served.api.get(f"flow_runs/{following}")["labels"].get("convoy.pid"))
    served.process_of(following).kill()
    served.pace.free()
    last = served.successor(following)
    state = served.api.finish(last)
    assert state["type"] == "FAILED"
    assert (
        "crashed 2 times, more than params.yaml: schedule.max_resubmissions 1" in state["message"]
    )
    assert "is gone" in state["message"]
    assert "`convoy run`" in state["message"]
    wait_until(lambda: served.api.tasks(run_id)["train"]["state_type"] == "CRASHED", 60)
    assert not served.successors(last)


def test_a_run_of_a_lost_machine_is_crashed_by_the_automation_and_goes_on(
    served: Served, lost: str
) -> None:
    state = served.api.finish(lost)
    assert (state["type"], state["message"][:12]) == ("CRASHED", "No heartbeat")
    assert served.api.finish(served.successor(lost))["type"] == "COMPLETED"


def test_a_cancelled_run_is_gone_in_ten_seconds_and_goes_on_while_the_server_is_away(
    served: Served,
) -> None:
    served.set_seed(9)
    run_id = served.start()
    run = served.process_of(run_id)
    family = [run, *run.children(recursive=True)]
    assert {"convoy-node", "convoy-agent", "convoy-rank-0"} <= {p.name() for p in family}
    served.workspace.run("prefect", "flow-run", "cancel", run_id)
    _, alive = psutil.wait_procs(family, 10)
    assert not alive
    assert served.api.finish(run_id)["type"] == "CANCELLED"
    assert read_statuses(served.workspace)[0] == "KILLED"
    time.sleep(2)
    assert not served.successors(run_id)

    run_id = served.start()
    served.server.kill()
    steps = served.num_steps()
    time.sleep(AWAY_SECONDS)
    assert served.num_steps() > steps
    assert served.process.poll() is None
    served.server.start()
    served.pace.free()
    # After longer than silence_seconds it is Crashed for a moment, and Running again.
    wait_until(lambda: served.api.state(run_id)["type"] == "COMPLETED")
    report = served.workspace.read_json("artifacts/train/report.json")
    assert report["resumed"]
    # Once, after the cancelled run: the server that was away broke nothing off.
    assert [stretch["kind"] for stretch in report["stretches"]].count("training") == 2
    assert not report["incidents"]
    assert read_statuses(served.workspace)[0] == "FINISHED"
    wait_until(lambda: {"train", "register"} <= set(served.api.tasks(run_id)))
    wait_until(
        lambda: {t["state_type"] for t in served.api.tasks(run_id).values()} == {"COMPLETED"}, 60
    )
    assert {"training", "metrics", "model-version"} <= set(served.api.artifacts(run_id))


def test_what_prefect_says_wrongly_of_a_run_is_put_right_without_a_hand(served: Served) -> None:
    served.set_seed(11)
    run_id = served.start()
    process = served.process_of(run_id)
    process.suspend()  # it is at work, and will not have ended before somebody looks
    try:
        # As the automation, after a server that was away for longer than silence_seconds.
        served.set_state(run_id, "CRASHED", "No heartbeat for 45 s: its machine is gone")
        following = served.successor(run_id)
        wait_until(lambda: served.api.state(run_id)["type"] == "RUNNING", 60)
    finally:
        process.resume()
        served.pace.free()
    assert served.api.finish(run_id)["type"] == "COMPLETED"
    assert not served.workspace.read_json("artifacts/train/report.json")["resumed"]
    state = served.api.finish(following)
    assert state["type"] == "CANCELLED"
    assert "did not crash after all" in state["message"]

    # As Prefect's runner, which is ended while the run's process is ending.
    served.set_state(run_id, "CANCELLED", "Runner is shutting down.", force=True)
    # One that was not at its end stays Cancelled.
    served.set_state(following, "CANCELLED", "Runner is shutting down.", force=True)
    wait_until(lambda: served.api.state(run_id)["type"] == "COMPLETED", 60)
    assert served.api.state(following)["type"] == "CANCELLED"


def test_automations_are_installed_once(served: Served) -> None:
    before = wait_until(lambda: served.automations() if len(served.automations()) > 1 else None)
    served.process.send_signal(signal.SIGTERM)
    served.serve_again()
    updated = served.api.deployment["updated"]
    wait_until(lambda: served.api.get("deployments/name/train/toy")["updated"] != updated)
    told = served.workspace.run("convoy", "reconcile")
    assert "MLflow and Prefect know all" in told
    assert served.automations() == before
    assert len(before) == 2
