"""How `convoy up` and `convoy run` end, and that the workspace goes on without servers.

The tests build on one another, in this order.
"""

import json
import re
import signal

import psutil
import pytest

from pipeline.stages import STAGES
from tests.flows.convoy_up import Up, await_nobody, find_processes, read_urls, start_up, tags
from tests.flows.prefect_api import wait_until
from tests.flows.terminal import run_on_terminal
from tests.workspaces import Workspace


def kill_servers(up: Up, *names: str) -> None:
    """Kill each of these servers with all that it has started; its guard is left."""
    for guard in psutil.Process(up.process.pid).children():
        if any(name in guard.cmdline() for name in names):
            for process in guard.children(recursive=True):
                process.kill()


def test_servers_that_are_killed_in_mid_run_are_started_again(up: Up, completed: str) -> None:
    with up.pace.slowed():
        run_id = up.api.start(steps=400, seed=5)
        wait_until(lambda: re.search(r"train: [1-9][\d,]*/400 steps", up.api.logs(run_id)))
        kill_servers(up, "prefect", "mlflow")
        wait_until(lambda: up.api.is_up() and up.is_mlflow_up())
    assert up.api.finish(run_id)["type"] == "COMPLETED"
    log = up.workspace.read("artifacts/train/steps.jsonl")
    steps = [json.loads(line)["step"] for line in log.splitlines()]
    wait_until(lambda: up.mlflow_statuses()[run_id] == "FINISHED", 60)
    [run] = [r for r in up.mlflow_runs() if tags(r["data"])["prefect.flow_run_id"] == run_id]
    history = up.ask_mlflow(
        "metrics/get-history", run_id=run["info"]["run_id"], metric_key="loss", max_results=5000
    )
    assert sorted(metric["step"] for metric in history["metrics"]) == steps


def test_a_killed_worker_is_started_again_and_its_run_goes_on(up: Up, completed: str) -> None:
    with up.pace.slowed():
        run_id = up.api.start(steps=400, seed=6)
        wait_until(lambda: re.search(r"train: [1-9][\d,]*/400 steps", up.api.logs(run_id)))
        kill_servers(up, "flows.cli")
    wait_until(lambda: up.api.state(run_id)["type"] == "CRASHED")
    [following] = wait_until(
        lambda: [run for run in up.api.runs() if run["parameters"].get("continues") == run_id]
    )
    assert up.api.finish(following["id"])["type"] == "COMPLETED"
    assert up.process.poll() is None


def test_a_run_of_another_terminal_is_cancelled_like_one_of_the_deployment(
    up: Up, completed: str
) -> None:
    process = up.workspace.start("convoy", "run", "--set", "train.steps=1000000")
    await_workers(up.workspace)
    running = {"flow_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
    [run] = up.api.post("flow_runs/filter", running).json()
    up.workspace.run("prefect", "flow-run", "cancel", run["id"], PREFECT_API_URL=up.api.url)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 143, output
    assert up.api.finish(run["id"])["type"] == "CANCELLED"
    assert up.mlflow_statuses()[run["id"]] == "KILLED"
    assert not [p for p in find_processes(up.workspace) if p.startswith("convoy-")]


def test_ctrl_c_ends_it_whole_and_a_running_flow_with_it(up: Up, completed: str) -> None:
    run_id = up.api.start(steps=1_000_000, seed=8)
    wait_until(lambda: re.search(r"train: [1-9][\d,]*/1,000,000 steps", up.api.logs(run_id)))
    up.process.send_signal(signal.SIGINT)
    output, _ = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, output
    *told, last = output.splitlines()
    assert last == "stopped"
    again = re.compile(r"(prefect|mlflow|serve) ended with status \d+ and is started again")
    assert all(again.fullmatch(line) for line in told)  # of the tests above
    assert not find_processes(up.workspace)
    assert read_status(up.workspace) == "KILLED"


def test_without_the_servers_the_workspace_goes_on(up: Up, completed: str) -> None:
    """After the test above: from here on with a Prefect API that lives as long as the run."""
    seen = run_on_terminal(up.workspace, "convoy", "run", "--set", "train.steps=25")
    for stage in STAGES:
        assert f"\x1b[1m{stage:>9}" in seen
    assert "25/25 steps" in seen
    assert "not used: 270 records of CN" in seen
    assert "toy version 4 " in seen
    assert "ran: train, evaluate, register" in seen
    for noise in ("file/s", "files/s", "lock", "View run", "Traceback", "Error", "prefect"):
        assert noise not in seen
    await_nobody(up.workspace)


def test_to_do_nothing_takes_no_prefect(up: Up, completed: str) -> None:
    before = up.workspace.read("dvc.lock")
    output = up.workspace.run("convoy", "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "ran: nothing" in output
    assert up.workspace.read("dvc.lock") == before


def test_a_killed_run_takes_its_api_and_workers_along(up: Up, completed: str) -> None:
    process = up.workspace.start("convoy", "run", "--set", "train.steps=1000000")
    await_workers(up.workspace)
    assert [line for line in find_processes(up.workspace) if "flows.ephemeral" in line]
    process.kill()
    output, _ = process.communicate()
    await_nobody(up.workspace)
    assert output.startswith(
        "ingest: up to date\nshard: up to date\nupload: up to date\n"
        "train: changed deps: params.yaml:train modified\n"
    )
    assert "\x1b" not in output


def test_ctrl_c_ends_a_run_and_says_killed(up: Up, completed: str) -> None:
    process = up.workspace.start("convoy", "run", "--set", "train.steps=900000")
    await_workers(up.workspace)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    *_, interrupted, kept, resumed = output.splitlines()
    assert interrupted == "interrupted"
    assert "params.yaml keeps train.steps=900000" in kept
    assert "goes on from the last finished stage and checkpoint" in resumed
    assert "Traceback" not in output
    assert not find_processes(up.workspace)
    assert read_status(up.workspace) == "KILLED"


@pytest.mark.parametrize(("number", "ready"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_no_process_is_left_of_an_ended_up(
    up: Up, completed: str, number: int, ready: bool
) -> None:
    process = start_up(up.workspace)
    if ready:
        read_urls(process)
    else:
        wait_until(lambda: [p for p in find_processes(up.workspace) if "mlflow" in p])
    process.send_signal(number)
    process.communicate(timeout=60)
    await_nobody(up.workspace)
    status = up.workspace.run("convoy", "status", "--json")
    assert '"services": null' in status


def await_workers(workspace: Workspace) -> None:
    wait_until(lambda: [p for p in find_processes(workspace) if p.startswith("convoy-rank")])


def read_status(workspace: Workspace) -> str:
    """How the newest training run ended, as MLflow has it, without a server."""
    read = "from training.tracking import read_runs;"
    read += "print(read_runs('sqlite:///.convoy/mlflow.db', 'convoy')[0].status)"
    return workspace.python(read).splitlines()[-1]
