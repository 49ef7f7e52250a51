"""A node of this machine is given to one run, all that a run needs or none; a death gives back."""

from pathlib import Path

import psutil
import pytest

from pipeline.errors import ConfigError, PipelineError
from pipeline.machine import hold_nodes
from tests.flows.prefect_api import wait_until
from tests.workspaces import Workspace, make_workspace

HOLD = """
import sys, time
from pipeline.machine import hold_nodes
with hold_nodes({number}, 0.0, "train"):
    print("held", flush=True)
    time.sleep(300)
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    values = {"XDG_RUNTIME_DIR": str(tmp_path), "CONVOY_MACHINE_NODES": "3"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def count_nodes(workspace: Workspace) -> int:
    found = 0
    for process in psutil.process_iter():
        try:
            found += process.name() == "convoy-node" and process.cwd() == str(workspace.path)
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue
    return found


def test_a_run_waits_for_all_of_its_nodes_and_gets_those_of_a_killed_one(
    environment: dict[str, str], tmp_path: Path
) -> None:
    first = make_workspace(tmp_path / "first", environment)
    first.set("train.steps", 1_000_000)
    second = make_workspace(tmp_path / "second", environment)
    for workspace in (first, second):
        workspace.set("train.nodes", 2)
        for stage in ("ingest", "shard", "upload"):
            workspace.run("convoy", "stage", stage)
    holder = first.start("convoy", "stage", "train")
    wait_until(lambda: count_nodes(first) == 2)

    second.set("schedule.wait_seconds", 1)
    refused = second.run("convoy", "stage", "train", expect=1)
    assert "2 of this machine's 3 nodes did not come free in time, and the run starts" in refused
    assert f"node 1 is in use by {first.path}, train, process {holder.pid}, since" in refused
    assert not list(second.path.glob(".convoy/runs/*"))

    second.set("schedule.wait_seconds", 120)
    waiting = second.start("convoy", "stage", "train")
    assert waiting.stdout is not None
    line = next(line for line in waiting.stdout if "waiting for 2 of this machine's 3" in line)
    assert "none is started" in line
    assert count_nodes(second) == 0
    holder.kill()
    holder.communicate(timeout=30)
    output, _ = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, output


@pytest.mark.usefixtures("environment")
def test_who_waits_first_is_served_first(tmp_path: Path) -> None:
    workspace = make_workspace(tmp_path / "w")
    holder = workspace.start("python", "-c", HOLD.format(number=2))
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    large = workspace.start("python", "-c", HOLD.format(number=3).replace("0.0", "60.0"))
    assert large.stdout is not None
    line = tmp_path / "convoy" / "line"
    wait_until(lambda: line.exists() and psutil.Process(large.pid).num_fds() > 3)
    try:
        # One node is free, and a run of one node may not take it before the large one.
        wait_until(lambda: _is_refused(1))
        holder.kill()
        assert large.stdout.readline() == "held\n"
    finally:
        for process in (holder, large):
            process.kill()
            process.communicate()
    with hold_nodes(3, 5.0, "train"):
        pass


def _is_refused(number: int) -> bool:
    try:
        with hold_nodes(number, 0.0, "train"):
            return False
    except PipelineError:
        return True


@pytest.mark.usefixtures("environment")
def test_more_nodes_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ConfigError, match="4 are asked for and this machine has 3"),
        hold_nodes(4, 60.0, "train"),
    ):
        pass
    monkeypatch.setenv("CONVOY_MACHINE_NODES", "many")
    with (
        pytest.raises(ConfigError, match="'many' is no number of nodes"),
        hold_nodes(1, 60.0, "train"),
    ):
        pass
