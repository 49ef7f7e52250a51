"""A DVC that is killed leaves nothing that stops the next run."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.dvc_locks import restore_lock_file
from pipeline.errors import VersioningError
from pipeline.versioning import find_stale
from tests.flows.prefect_api import wait_until
from tests.workspaces import Workspace, make_workspace

STOPPING = """
def ingest(destination, count=900):
    import time
    (destination / "begun").touch()
    time.sleep(300)
"""
COMMIT_AND_DIE = """
import os, signal
import dvc.utils.serialize._yaml as serializer
from pathlib import Path
from pipeline.versioning import commit_stage

def die(data, stream, *more, **named):
    if stream.name.endswith("dvc.lock"):
        stream.write("schema: '2.0'\\nstages:\\n  ing")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    dump(data, stream, *more, **named)

dump = serializer._dump
serializer._dump = die
commit_stage(Path.cwd(), "shard")
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    workspace = make_workspace(tmp_path / "w")
    monkeypatch.chdir(workspace.path)
    return workspace


@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash"])  # which goes, and which stays
def test_a_killed_repro_and_a_number_that_another_has(workspace: Workspace, shell: str) -> None:
    module = workspace.path / "toy_workload.py"
    good = module.read_text()
    module.write_text(good + STOPPING)
    repro = workspace.start("dvc", "repro", "ingest", SHELL=shell)
    wait_until(lambda: list(workspace.path.rglob("begun")))
    rwlock = workspace.path / ".dvc/tmp/rwlock"
    held = json.loads(rwlock.read_bytes())
    assert held["write"]
    repro.kill()
    repro.communicate(timeout=30)
    module.write_text(good)
    # The number that the dead one had goes to another process, as numbers do.
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        for owner in held["write"].values():
            owner["pid"] = other.pid
        written = rwlock.stat().st_mtime - 60
        rwlock.write_text(json.dumps(held))
        subprocess.run(["touch", f"--date=@{written}", rwlock], check=True)
        workspace.run("convoy", "stage", "ingest")
        refused = workspace.run("dvc", "commit", "-f", "ingest", expect=1)
        assert "is busy, it is being blocked by" in refused  # what DVC makes of it
        workspace.python(
            "from pathlib import Path; from pipeline.versioning import commit_stage;"
            "commit_stage(Path.cwd(), 'ingest')"
        )
        assert find_stale(workspace.path, "ingest") == []
    finally:
        other.kill()
        other.wait()


def test_a_lock_of_a_living_process_stays(workspace: Workspace) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    try:
        rwlock = workspace.path / ".dvc/tmp/rwlock"
        path = str(workspace.path / "datasets/toy")
        owner = {"pid": other.pid, "cmd": "dvc repro"}
        rwlock.write_text(json.dumps({"write": {path: owner}, "read": {path: [owner]}}))
        with pytest.raises(VersioningError, match="is busy, it is being blocked by"):
            find_stale(workspace.path, "ingest")
        assert json.loads(rwlock.read_bytes()) == {"write": {path: owner}, "read": {path: [owner]}}
    finally:
        other.kill()
        other.wait()


def test_a_lock_file_that_was_cut_in_mid_write(workspace: Workspace) -> None:
    rwlock = workspace.path / ".dvc/tmp/rwlock"
    rwlock.write_text('{"write": {"/so')
    workspace.run("dvc", "commit", "-f", "ingest", expect=1)  # it stops DVC
    assert find_stale(workspace.path, "ingest") == ["not run before"]


def test_a_commit_that_is_killed_in_mid_write_forgets_no_stage(workspace: Workspace) -> None:
    for stage in ("ingest", "shard"):
        workspace.run("convoy", "stage", stage)
    workspace.run("dvc", "commit", "-f", "ingest")
    before = workspace.read("dvc.lock")
    process = workspace.start("python", "-c", COMMIT_AND_DIE)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert workspace.read("dvc.lock") != before
    restore_lock_file(workspace.path)
    assert workspace.read("dvc.lock") == before
    assert find_stale(workspace.path, "ingest") == []
    assert find_stale(workspace.path, "shard") == ["not run before"]
    restore_lock_file(workspace.path)  # nothing is left to do
    assert workspace.read("dvc.lock") == before
