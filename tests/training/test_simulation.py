"""`convoy simulate`: real nodes are cut off, stopped and killed, by scenario and by command."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pipeline.conftest import uploaded, work
from tests.training.test_kill import processes, wait_until
from tests.training.test_nodes import STEPS, TOLERANCE, read_samples, seeing_workspace, set_pace
from tests.workspaces import BIN, Workspace
from training.errors import NetworkUnavailable
from training.network import NamespaceNetwork

__all__ = ["uploaded", "work"]

SCENARIO = """
train:
  nodes: 2
  min_nodes: 1
  max_restarts: 3
  recovery: {exclude_seconds: 1}
  network: {namespaces: true, rate_mbit: 200, lost_seconds: 2}
disk_mib: 16
faults:
  - {fault: cut, node: 1, step: 5, for_seconds: 5}
"""


@pytest.fixture
def _can_make_namespaces() -> None:
    try:
        NamespaceNetwork(2, dict(os.environ)).close()
    except NetworkUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


def _num_ranks(workspace: Workspace) -> int:
    return len(processes(workspace, "convoy-rank"))


def _slow_down(workspace: Workspace, seconds: float) -> None:
    """Let rank 1 run for a tenth of the time."""
    [rank] = processes(workspace, "convoy-rank-1")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        rank.suspend()
        time.sleep(0.45)
        rank.resume()
        time.sleep(0.05)


def _read_firsts(result: dict[str, Any]) -> list[int]:
    """The steps that the worlds began with."""
    lost = [one["last_step"] - one["steps_lost"] for one in result["incidents"]]
    grown = [one["step"] + 1 for one in result["notices"] if one["kind"] == "more_nodes"]
    return sorted([1, *lost, *grown])


@pytest.mark.usefixtures("_can_make_namespaces")
def test_cut_off_then_slow_then_killed_then_filled(tmp_path: Path) -> None:
    workspace = seeing_workspace(tmp_path / "w", dims={"dp_replicate": 2})
    (workspace.path / "scenario.yaml").write_text(SCENARIO)
    workspace.run("convoy", "simulate", "run")  # nothing happens, for comparison
    undisturbed = workspace.read(".convoy/simulation/run/steps.jsonl").splitlines()
    expected = read_samples(workspace, [1])
    for path in (workspace.path / "seen").iterdir():
        path.unlink()
    devices = socket.if_nameindex()

    set_pace(workspace, 1.0)
    command = ("convoy", "simulate", "run", "scenario.yaml", "--json", "--record", "again.yaml")
    running = workspace.start(*command)
    wait_until(lambda: _num_ranks(workspace) == 2)
    wait_until(lambda: _num_ranks(workspace) == 1)  # node 1 is cut off
    wait_until(lambda: _num_ranks(workspace) == 2)
    wait_until(lambda: len(list(workspace.path.glob("seen/*-1"))) == 2)
    set_pace(workspace, 0.1)
    _slow_down(workspace, 12)
    set_pace(workspace, 1.0)
    refused = workspace.run("convoy", "simulate", "fault", "kill", "node-7", expect=1)
    assert "error: there is no node 7: there are 0, 1" in refused
    assert "node 0 was killed" in workspace.run("convoy", "simulate", "fault", "kill", "node-0")
    wait_until(lambda: _num_ranks(workspace) == 1)
    wait_until(lambda: len(list(workspace.path.glob("seen/*-1"))) == 3)
    workspace.run("convoy", "simulate", "fault", "fill", "node-1")
    set_pace(workspace, 0.1)
    wait_until(lambda: _num_ranks(workspace) == 1)  # it is lost with the next checkpoint
    set_pace(workspace, 1.0)
    wait_until(lambda: _num_ranks(workspace) == 2)
    set_pace(workspace, 0.0)
    output, _ = running.communicate(timeout=240)
    assert running.returncode == 0, output

    result = json.loads(output[output.rindex("\n{\n") :])
    assert [(one["cause"], one["node"]) for one in result["incidents"]] == [
        ("node_lost", 1),
        ("node_lost", 0),
        ("node_lost", 1),
    ]
    assert "did not answer over the network" in result["incidents"][0]["message"]
    kinds = [one["kind"] for one in result["notices"] if one["kind"] != "straggler"]
    assert kinds == ["fault", "fewer_nodes", "more_nodes"] * 3
    assert "the disk of the node of rank 1 is full" in result["incidents"][2]["message"]
    late = next(one for one in result["notices"] if one["kind"] == "straggler")
    assert (late["rank"], late["node"]) == (1, 1)
    assert "late in each step" in late["message"]
    assert result["steps"] == STEPS
    assert 0 < result["seconds_lost"] < result["seconds"]
    assert read_samples(workspace, _read_firsts(result)) == expected
    last = json.loads(undisturbed[-1])["loss"]
    assert result["final_loss"] == pytest.approx(last, rel=TOLERANCE)

    again = yaml.safe_load(workspace.read("again.yaml"))
    assert again["disk_mib"] == 16
    assert [(one["fault"], one["node"]) for one in again["faults"]] == [
        ("cut", 1),
        ("kill", 0),
        ("fill", 1),
    ]
    assert again["faults"][0]["step"] == pytest.approx(5, abs=1)
    assert processes(workspace) == []
    assert socket.if_nameindex() == devices
    assert not (workspace.path / "artifacts/train").exists()
    assert not list(workspace.path.glob(".convoy/stores/eu/checkpoints/**/*.*"))
    over = workspace.run("convoy", "simulate", "fault", "kill", "node-0", expect=1)
    assert "error: no simulation runs in this workspace" in over


def test_what_cannot_be_simulated_is_said(work: Workspace) -> None:
    (work.path / "scenario.yaml").write_text(
        "disk_mib: 8\nfaults:\n  - {fault: cut, node: 0, step: 2}\n"
        "  - {fault: fill, node: 0, step: 2}\n"
        "  - {fault: clock, node: 0, step: 2, move_seconds: 9}\n"
    )
    # Without util-linux and iproute2.
    output = work.run("convoy", "simulate", "run", "scenario.yaml", "--json", PATH=str(BIN))
    result = json.loads(output[output.rindex("\n{\n") :])
    said = [one["message"] for one in result["notices"] if one["kind"] == "not_simulated"]
    assert "no network namespaces can be had (`unshare` of util-linux is not installed)" in said[0]
    assert "links that are limited, slow or cut, are not simulated" in said[0]
    assert said[1].startswith("nodes have no disks and clocks of their own: ")
    assert [text.partition(":")[0] for text in said[2:]] == [
        "that the link of node 0 was cut",
        "that the disk of node 0 was filled",
        "that the clock of node 0 was moved by 9 s",
    ]
    assert result["happened"]["faults"] == result["incidents"] == []
