"""`convoy run` without a server: a Prefect API of its own, which ends with it."""

import os
import pty
import signal
import subprocess

import pytest

from pipeline.stages import STAGES
from tests.flows.convoy_up import await_nobody, find_processes
from tests.flows.prefect_api import wait_until
from tests.workspaces import BIN, Workspace, make_workspace


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    return make_workspace(tmp_path_factory.mktemp("run") / "w")


def run_on_terminal(workspace: Workspace, *command: str) -> str:
    """What a terminal is sent, control sequences included."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, **workspace.environment, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=workspace.path,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = b""
    while data := _read(ours):
        screen += data
    os.close(ours)
    assert process.wait() == 0, screen.decode()
    return screen.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed
        return b""


def test_a_terminal_shows_bars_and_nothing_between_them(workspace: Workspace) -> None:
    seen = run_on_terminal(workspace, "convoy", "run")
    for stage in STAGES:
        assert f"\x1b[1m{stage:>9}" in seen
    assert "30/30 steps" in seen
    assert "not used: 270 records of CN" in seen
    assert "ran: ingest, shard, upload, train, evaluate, register" in seen
    for noise in ("file/s", "files/s", "lock", "View run", "Traceback", "Error", "prefect"):
        assert noise not in seen
    await_nobody(workspace)


def test_to_do_nothing_takes_no_prefect(workspace: Workspace) -> None:
    before = workspace.read("dvc.lock")
    output = workspace.run("convoy", "run", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert "ran: nothing" in output
    assert workspace.read("dvc.lock") == before


def test_a_log_gets_plain_lines(workspace: Workspace) -> None:
    output = workspace.run("convoy", "run", "--set", "register.model_name=other")
    assert output.startswith(
        "ingest: up to date\nshard: up to date\nupload: up to date\ntrain: up to date\n"
        "evaluate: up to date\nregister: changed deps: params.yaml:register modified\n"
        "register: done in "
    )
    assert "\x1b" not in output
    await_nobody(workspace)


def test_a_killed_run_takes_its_api_and_workers_along(workspace: Workspace) -> None:
    process = workspace.start("convoy", "run", "--set", "train.steps=1000000")
    wait_until(lambda: any("training.worker" in line for line in find_processes(workspace)))
    assert any("flows.ephemeral" in line for line in find_processes(workspace))
    process.kill()
    process.communicate()
    await_nobody(workspace)


def test_ctrl_c_ends_it_and_says_killed(workspace: Workspace) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = workspace.start("convoy", "run")
    wait_until(lambda: any("training.worker" in line for line in find_processes(workspace)))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert output.splitlines()[-1] == "interrupted"
    assert "Traceback" not in output
    assert not find_processes(workspace)
