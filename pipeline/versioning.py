"""git and DVC: what revision this is, which stages are up to date, and the snapshot of a flow."""

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from pipeline.dvc_locks import LOCK_FILE, clear_dead_locks, committing
from pipeline.errors import VersioningError

if TYPE_CHECKING:
    from dvc.repo import Repo


class Revision(BaseModel, frozen=True, extra="forbid"):
    """The state of the code, the parameters and the data."""

    git: str
    """Commit, with `-dirty` when tracked files differ from it or git does not know some code;
    `none` before the first commit."""
    dvc: str
    """SHA-256 of dvc.lock, hex; `none` before the first snapshot."""


class Snapshot(BaseModel, frozen=True, extra="forbid"):
    """What ends a flow: DVC knows every output, and the workspace is clean to it."""

    revision: Revision
    stages: tuple[str, ...]
    """Stages that this flow ran; the others were up to date."""


def check_repository(root: Path, *, require_clean: bool) -> None:
    """Raise VersioningError unless root is in a git repository with DVC, clean when required."""
    done = _run_git(root, "rev-parse", "--is-inside-work-tree")
    if done.returncode:
        raise VersioningError(
            f"{root} is not in a git repository that can be read, and DVC versions data beside "
            "code: run `git init` and `dvc init` here (`convoy init` does both for a new "
            f"workspace). git says: {done.stderr.strip()}"
        )
    if not (root / ".dvc").is_dir():
        raise VersioningError(f"{root} has no .dvc folder: run `dvc init` here")
    if not (root / "dvc.yaml").is_file():
        raise VersioningError(f"{root}/dvc.yaml is missing: `convoy init` writes one")
    changed = _changed_files(root)
    if require_clean and changed:
        raise VersioningError(
            f"register.require_clean_git is true and {', '.join(changed[:5])} "
            f"{'is' if len(changed) == 1 else 'are'} not committed: commit, or set it to false"
        )


def read_revision(root: Path) -> Revision:
    """The present revision."""
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD") or "none"
    lock = root / LOCK_FILE
    return Revision(
        git=commit + ("-dirty" if commit != "none" and _changed_files(root) else ""),
        dvc=hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else "none",
    )


def find_stale(root: Path, stage: str) -> list[str]:
    """Why DVC would run the stage; empty when it is up to date."""
    with open_repository(root) as repo:
        status: dict[str, Any] = repo.status(targets=[stage])
        # Of a stage that it never noted DVC says that all it reads was modified.
        if status and not any(out.hash_info for out in repo.stage.load_one(name=stage).outs):
            return ["not run before"]
    reasons: list[str] = []
    for changes in status.values():
        for change in changes:
            if isinstance(change, str):
                reasons.append(change)
                continue
            for kind, paths in change.items():
                reasons += [f"{kind}: {path} {how}" for path, how in _flatten(paths)]
    return reasons


def commit_stage(root: Path, stage: str) -> None:
    """Tell DVC that the stage was run and these are its outputs."""
    with open_repository(root) as repo, committing(root):
        repo.commit(target=stage, force=True)


def take_snapshot(root: Path, stages: tuple[str, ...]) -> Snapshot:
    """End a flow. Raises VersioningError when an output or a dependency changed meanwhile."""
    with open_repository(root) as repo:
        status = repo.status()
    if status:
        raise VersioningError(
            f"after the flow DVC finds changes in {', '.join(status)}: a file was changed while "
            "it ran; run `dvc status` to see which, then run the flow again"
        )
    return Snapshot(revision=read_revision(root), stages=stages)


@contextlib.contextmanager
def open_repository(root: Path) -> Iterator["Repo"]:
    """DVC's view of the workspace, quiet. Its errors are raised as VersioningError."""
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    import logging

    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    logging.getLogger("dvc").setLevel(logging.WARNING)
    # Its bars are drawn unless their loggers ask for less, and would cross those of the flow.
    for name in ("dvc.progress", "dvc_data.callbacks"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        clear_dead_locks(root)
        with Repo(str(root)) as repo:
            yield repo
    except DvcException as error:
        raise VersioningError(f"DVC in {root}: {error}") from error


def _flatten(paths: Any) -> Iterator[tuple[str, str]]:
    for path, how in paths.items():
        if isinstance(how, dict):
            for key, inner in how.items():
                yield f"{path}:{key}", str(inner)
        else:
            yield str(path), str(how)


def _changed_files(root: Path) -> list[str]:
    """Tracked files that differ from HEAD, and code and parameters that git does not know; but for
    what the stages themselves write.
    """
    written = [f":(exclude){name}" for name in (LOCK_FILE, "artifacts", "datasets")]
    options = ("--porcelain", "-z", "--no-renames", "--untracked-files=all")
    output = _git(root, "status", *options, "--", ".", *written)
    entries = [(entry[:2], entry[3:]) for entry in output.split("\0") if entry]
    return [name for code, name in entries if code != "??" or name.endswith((".py", ".yaml"))]


def _git(root: Path, *arguments: str) -> str:
    """What git prints; empty when it refuses."""
    done = _run_git(root, *arguments)
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""


def _run_git(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            # Without the lock that `git status` would refresh its index under: a kill leaves it.
            ["git", "--no-optional-locks", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise VersioningError("git is not installed: Convoy and DVC need it") from None
