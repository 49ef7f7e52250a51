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
RUNS = STATE / "runs"
ACCESS_LOG = STATE / "access.log"
LOCK = STATE / "lock"


@contextlib.contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """A fresh directory that takes the target's place, whole, when the block ends well.

    DVC deletes outputs before it runs a stage and the other callers do not: so nothing stale
    stays in any case. Raises WorkspaceError for a full disk; the target is then as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        _sync(fresh)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WorkspaceError(
                f"{target} could not be written: the disk is full; what was there before is "
                "untouched. Make room and run the stage again"
            ) from error
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def lock_workspace(root: Path, what: str) -> Iterator[None]:
    """Hold the workspace for one flow or stage. Raises WorkspaceError, naming who holds it.

    The kernel drops the lock with its owner, however that one ends.
    """
    path = root / LOCK
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise WorkspaceError(
                f"the workspace {root} is in use by {file.read().strip() or 'another process'}; "
                "wait for it, or work in another copy of the repository"
            ) from None
        file.truncate(0)
        file.write(f"{what}, process {os.getpid()}, since {datetime.now(UTC):%Y-%m-%d %H:%M} UTC")
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
