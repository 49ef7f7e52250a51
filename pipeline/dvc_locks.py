"""What a killed DVC leaves that would stop the next one: read-write locks, and a cut dvc.lock.

DVC's own lock of the repository is the kernel's and dies with its owner.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.workspace import STATE
from training.process import started_seconds

LOCK_FILE = "dvc.lock"
_BEFORE = STATE / "dvc.lock.before"
"""dvc.lock as it was before a commit that is not at its end."""


def clear_dead_locks(root: Path) -> None:
    """Take the locks of processes that are gone out of DVC's read-write lock file.

    DVC does so itself, but not where another process has the number by now, and it stops at a file
    that was cut in mid-write.
    """
    path = root / ".dvc" / "tmp" / "rwlock"
    if not path.exists():
        return
    from dvc.lock import make_lock

    # The lock that DVC changes this file under.
    with make_lock(str(path.with_name("rwlock.lock"))):
        content = path.read_text()
        written = path.stat().st_mtime
        try:
            locks: dict[str, dict[str, Any]] = json.loads(content)
        except json.JSONDecodeError:
            # All that is known is that its writer ended, whose locks were in it.
            path.unlink()
            return
        kept: dict[str, dict[str, Any]] = {"write": {}, "read": {}}
        for name, owner in locks.get("write", {}).items():
            if _can_own(owner, written):
                kept["write"][name] = owner
        for name, owners in locks.get("read", {}).items():
            if alive := [owner for owner in owners if _can_own(owner, written)]:
                kept["read"][name] = alive
        if kept != {"write": {}, "read": {}} | locks:
            pending = path.with_suffix(".tmp")
            pending.write_text(json.dumps(kept))
            pending.rename(path)


def _can_own(owner: dict[str, Any], written: float) -> bool:
    """Whether a process of that number runs, and did when the file was written."""
    started = started_seconds(int(owner["pid"]))
    # The clock of starts is coarse.
    return started is not None and started < written + 1.0


@contextlib.contextmanager
def committing(root: Path) -> Iterator[None]:
    """DVC writes dvc.lock in its place: keep the one before until it is whole."""
    before, path = root / _BEFORE, root / LOCK_FILE
    before.parent.mkdir(mode=0o700, exist_ok=True)
    pending = before.with_suffix(".tmp")
    if path.exists():
        shutil.copy(path, pending)
    else:
        pending.write_bytes(b"")
    pending.rename(before)
    yield
    before.unlink()


def restore_lock_file(root: Path) -> None:
    """Undo a commit that was killed in mid-write; called by who holds the workspace."""
    before, path = root / _BEFORE, root / LOCK_FILE
    if not before.exists():
        return
    if _is_whole(path, before):
        before.unlink()
    elif before.stat().st_size:
        before.rename(path)
    else:
        path.unlink(missing_ok=True)
        before.unlink()


def _is_whole(path: Path, before: Path) -> bool:
    """Whether it has all stages of the one before."""
    import yaml

    try:
        present = yaml.safe_load(path.read_text()) or {}
    except (FileNotFoundError, yaml.YAMLError):
        return False
    earlier = yaml.safe_load(before.read_text()) or {}
    stages = present.get("stages", {})
    return bool(stages) and set(earlier.get("stages", {})) <= set(stages)
