"""How `convoy up` and `convoy run` end, and that the workspace goes on without servers.

The tests build on one another, in this order.
"""

import signal

import pytest

from pipeline.stages import STAGES
from tests.flows.convoy_up import Up, await_nobody, find_processes, read_urls, start_up
from tests.flows.prefect_api import wait_until
from tests.flows.terminal import run_on_terminal
from tests.workspaces import Workspace


def test_ctrl_c_ends_it_whole_and_a_running_flow_with_it(up: Up, completed: str) -> None:
    run_id = up.api.start(steps=1_000_000, seed=8)
    wait_until(lambda: "train: 5/1,000,000 steps" in up.api.logs(run_id))
    up.process.send_signal(signal.SIGINT)
    output, _ = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, output
    assert output == "stopped\n"
    assert not find_processes(up.workspace)
    assert read_status(up.workspace) == "KILLED"


def test_without_the_servers_the_workspace_goes_on(up: Up, completed: str) -> None:
    """After the test above: from here on with a Prefect API that lives as long as the run."""
    seen = run_on_terminal(up.workspace, "convoy", "run", "--set", "train.steps=25")
    for stage in STAGES:
        assert f"\x1b[1m{stage:>9}" in seen
    assert "25/25 steps" in seen
    assert "not used: 270 records of CN" in seen
    assert "toy version 2 " in seen
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
