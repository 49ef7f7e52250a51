"""The workspace: replaced whole or not at all, and used by one at a time."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import WorkspaceError
from pipeline.workspace import explain_disk, lock_workspace, replace_directory


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "artifacts" / "train"
    target.mkdir(parents=True)
    (target / "before").write_text("before")
    return target


def names(target: Path) -> list[str]:
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return sorted(path.name for path in target.iterdir())


def test_nothing_stale_stays(target: Path) -> None:
    with replace_directory(target) as fresh:
        (fresh / "after").write_text("after")
        assert (target / "before").exists()  # until the end
    assert names(target) == ["after"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_what_was_there(target: Path, error: type[BaseException]) -> None:
    def fail(fresh: Path) -> None:
        (fresh / "after").write_text("after")
        raise error

    with pytest.raises(error), replace_directory(target) as fresh:
        fail(fresh)
    assert names(target) == ["before"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_an_error_between_the_two_renames_leaves_what_was_there(
    target: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if path.name.endswith(".new"):
            raise error
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(type(error)), replace_directory(target) as fresh:
        (fresh / "after").write_text("after")
    assert names(target) == ["before"]


def test_a_kill_between_the_two_renames_loses_nothing(target: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from pipeline.workspace import replace_directory
rename = Path.rename
def kill(path, to):
    if path.name.endswith(".new"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, to)
Path.rename = kill
with replace_directory(Path({str(target)!r})) as fresh:
    (fresh / "after").write_text("after")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert not target.exists()
    with pytest.raises(ValueError, match="again"), replace_directory(target):
        raise ValueError("again")
    assert names(target) == ["before"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"could not be written \(No space left on device\).* Make room and run"),
        (errno.EROFS, r"could not be written \(Read-only file system\).* Mount the disk writable"),
        (errno.EACCES, r"could not be written \(Permission denied\).* Give this user the right"),
    ],
)
def test_what_is_wrong_with_a_disk_is_said(target: Path, number: int, words: str) -> None:
    with pytest.raises(WorkspaceError, match=words) as refused, replace_directory(target):
        raise OSError(number, "content-of-a-record")
    assert str(target) in str(refused.value)
    assert "content-of-a-record" not in str(refused.value)
    assert names(target) == ["before"]


def test_another_system_error_is_not_taken_for_the_disks(target: Path) -> None:
    with pytest.raises(FileNotFoundError), explain_disk(target):
        (target / "nowhere").read_bytes()


def test_one_at_a_time_and_the_next_one_after_it(tmp_path: Path) -> None:
    def enter(what: str) -> None:
        with lock_workspace(tmp_path, what):
            raise AssertionError("two at once")

    with lock_workspace(tmp_path, "stage ingest"):
        for what in ("flow run x", "stage ingest"):
            with pytest.raises(WorkspaceError, match="is in use by stage ingest, process"):
                enter(what)
    with lock_workspace(tmp_path, "flow run x"):
        assert "flow run x" in (tmp_path / ".convoy" / "lock").read_text()


def test_a_lock_ends_with_its_owner_however_it_ends(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from pipeline.workspace import lock_workspace
with lock_workspace(Path({str(tmp_path)!r}), "stage train"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with lock_workspace(tmp_path, "stage train"):
        pass
