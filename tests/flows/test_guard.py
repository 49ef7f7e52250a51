"""No server outlives what started it, and none leaves a child."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.services import await_healthy, check_alive, free_port, running
from pipeline.errors import PipelineError
from tests.flows.prefect_api import wait_until

# A server with a child that takes no SIGTERM; they are found by their PYTHONPATH.
SERVER = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child])
time.sleep(300)
"""
STARTER = """
import os, sys, time
from pathlib import Path
from flows.services import running
with running("server", ["stubborn"], Path("server.log"), {"PYTHONPATH": os.getcwd()}):
    print("running", flush=True)
    time.sleep(300)
"""


def family(directory: Path) -> list[psutil.Process]:
    """Guard, server and the server's child, those of them that live."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PYTHONPATH") == str(directory):
                found.append(process)
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "stubborn.py").write_text(SERVER)
    return tmp_path


def test_a_block_ends_its_server_and_the_servers_child(directory: Path) -> None:
    environment = {"PYTHONPATH": str(directory)}
    with running("server", ["stubborn"], directory / "log", environment):
        wait_until(lambda: len(family(directory)) == 3, 20)
    assert not family(directory)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_starter_takes_its_server_along(directory: Path, number: int) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], cwd=directory)
    wait_until(lambda: len(family(directory)) == 3, 20)
    starter.send_signal(number)
    starter.wait()
    wait_until(lambda: not family(directory), 20)


def test_a_killed_guard_takes_the_server_along(directory: Path) -> None:
    environment = {"PYTHONPATH": str(directory)}
    with running("server", ["stubborn"], directory / "log", environment) as service:
        wait_until(lambda: len(family(directory)) == 3, 20)
        server = psutil.Process(service.process.pid).children()[0]
        service.process.kill()
        wait_until(lambda: not psutil.pid_exists(server.pid), 20)
    for process in family(directory):  # its child has nobody left who would end it
        process.kill()


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no such table')")
    log = tmp_path / "logs" / "broken.log"
    with running("broken", ["broken"], log, {"PYTHONPATH": str(tmp_path)}) as service:
        told = r"broken ended with status 1; the end of .*\n(.*\n)*no such table"
        with pytest.raises(PipelineError, match=told):
            await_healthy(service, f"http://127.0.0.1:{free_port(0)}")
        with pytest.raises(PipelineError):
            check_alive(service)


def test_a_guard_whose_parent_is_gone_ends_at_once(directory: Path) -> None:
    command = [sys.executable, "-m", "flows.guard", "1", "stubborn"]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    subprocess.run(command, env=environment, check=False, timeout=30)
    assert not family(directory)
