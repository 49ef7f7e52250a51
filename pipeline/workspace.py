"""The workspace on disk: where everything is, replaced whole, used by one at a time."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.errors import WorkspaceError

Result = TypeVar("Result", bound=BaseModel)

STATE = Path(".convoy")
ARTIFACTS = Path("artifacts")
DATASETS = Path("datasets")

MANIFEST = ARTIFACTS / "shard" / "manifest.json"
SHARDS = ARTIFACTS / "shard" / "shards"
RECEIPTS = ARTIFACTS / "upload"
TRAINED = ARTIFACTS / "train"
EVALUATED = ARTIFACTS / "evaluate"
REGISTERED = ARTIFACTS / "register"
REPORT = ARTIFACTS / "report" / "index.html"
PROFILE = ARTIFACTS / "report" / "profile.html"
RUNS = STATE / "runs"
OUTBOX = STATE / "outbox"
"""What MLflow is to be told, until it has been."""
EVALUATION = STATE / "evaluation"
"""What evaluation's workers leave, logs among it; replaced by the next ones."""
CROSSINGS = STATE / "crossings.json"
ACCESS_LOG = STATE / "access" / "log.jsonl"
LOCK = STATE / "lock"

_DISK_PROBLEMS = {
    errno.ENOSPC: "Make room",
    errno.EDQUOT: "Make room, or raise the disk quota,",
    errno.EROFS: "Mount the disk writable",
    errno.EACCES: "Give this user the right to write there",
    errno.EPERM: "Give this user the right to write there",
}


@contextlib.contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A fresh directory that takes the target's place, whole, when the block ends well.

    DVC deletes outputs before it runs a stage and the other callers do not: so nothing stale
    stays in any case. Raises WorkspaceError for a disk that is full or cannot be written; the
    target is then as it was, and so it is after a kill at any moment, once this is called again.
    """
    fresh = target.with_name(f".{target.name}.new")
    old = target.with_name(f".{target.name}.old")
    with explain_disk(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _restore(old, target)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        try:
            yield fresh
            _sync(fresh)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            _sync_entry(target.parent)
        finally:
            _restore(old, target)
            shutil.rmtree(fresh, ignore_errors=True)


def _restore(old: Path, target: Path) -> None:
    """Undo the first of the two renames when the second did not come; else remove what was old."""
    if old.exists() and not target.exists():
        old.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def explain_disk(target: Path) -> Iterator[None]:
    """Raise WorkspaceError, naming the target, for a disk that is full or cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_PROBLEMS:
            raise
        raise WorkspaceError(
            f"{target} could not be written ({os.strerror(error.errno)}); what was there before "
            f"is untouched. {_DISK_PROBLEMS[error.errno]} and run the stage again"
        ) from None


def copy_into(source: Path, directory: Path, field: str) -> None:
    """Copy a file, or all that a folder holds. Raises WorkspaceError naming the file and `field`,
    which names the source."""

    def copy(path: str, target: str) -> str:
        try:
            return str(shutil.copy(path, target))
        except OSError as error:
            # shutil.copytree would go on to the end and forget what kind of error it was.
            raise WorkspaceError(
                f"{field}: {path} could not be copied ({error.strerror or error}); what was there "
                "before is untouched. Mend it and run the stage again"
            ) from None

    if source.is_dir():
        shutil.copytree(source, directory, dirs_exist_ok=True, copy_function=copy)
    else:
        copy(str(source), str(directory))


@contextlib.contextmanager
def lock_workspace(root: Path, what: str) -> Iterator[None]:
    """Hold the workspace for one flow or stage. Raises WorkspaceError, naming who holds it.

    The kernel drops the lock with its owner, however that one ends.
    """
    path = root / LOCK
    with explain_disk(path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = path.open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise WorkspaceError(
                f"the workspace {root} is in use by {file.read().strip() or 'another process'}; "
                "wait for it, or work in another copy of the repository"
            ) from None
        with explain_disk(path):
            file.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
            file.write(f"{what}, process {os.getpid()}, since {since}")
            file.flush()
        yield


def write_result(path: Path, result: BaseModel) -> None:
    """A small noun as JSON that a person can read and git can compare."""
    content = result.model_dump(mode="json")
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_result(path: Path, kind: type[Result], stage: str) -> Result:
    """Read what a stage left. Raises WorkspaceError naming the stage to run."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise WorkspaceError(f"{path} is missing: run `convoy stage {stage}`") from None
    except ValidationError as error:
        raise WorkspaceError(
            f"{path}: {error.errors()[0]['msg']}: run `convoy stage {stage}` again"
        ) from None


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            _sync_entry(path)
    _sync_entry(directory)


def _sync_entry(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
