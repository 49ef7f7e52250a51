"""Small files that only their owner may read, written whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path


def create_private_file(path: Path, content: bytes) -> None:
    """Create a file of mode 0600, unless there is one; of two that try at once one is first.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = _write_beside(path, content)
    try:
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(unfinished)
    finally:
        unfinished.unlink()
    sync_directory(path.parent)


def replace_private_file(path: Path, content: bytes) -> None:
    """Put a file of mode 0600 in the place of another, if there is one. Raises OSError."""
    unfinished = _write_beside(path, content)
    try:
        unfinished.replace(path)
    except OSError:
        unfinished.unlink()
        raise


def _write_beside(path: Path, content: bytes) -> Path:
    unfinished = path.with_name(f"{path.name}~{secrets.token_hex(8)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
    except OSError:
        unfinished.unlink()
        raise
    return unfinished


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk, and not their files' content. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
