"""Sealed objects kept on this machine, so that a second epoch asks the store for nothing.

What is kept are the bytes as the store gave them: no plaintext and no key. They prove nothing by
lying here, so whoever reads one authenticates it as if it came from the store.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, PositiveInt

from data.errors import CacheUnusable

_TOTAL = "total"
_SUFFIX = ".sealed"
_FIELD = "params.yaml: train.cache"


class CacheConfig(BaseModel, frozen=True, extra="forbid"):
    """Where sealed shards are kept after they were read, and how much of them."""

    directory: Path = Path(".convoy/cache")
    """Of this user alone; relative to the workspace. It may serve many runs and workspaces."""
    limit_bytes: PositiveInt = 10 << 30
    """The least recently read are removed when more is kept."""


class SealedCache:
    """Objects by name in a directory, at most `limit_bytes` of them, for many processes at once.

    An object is there whole or not at all. The directory has mode 0700 and must be this user's: in
    one that others can write, they could watch what is read and fill the disk.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        with self._naming_errors():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise CacheUnusable(
                f"{_FIELD}.directory: {directory} is open to other users: name one of your own "
                f"(or, if it is yours: chmod 700 {directory})"
            )

    def get(self, name: str) -> bytes | None:
        """An object, or None if it is not kept. It is not authenticated. Raises CacheUnusable."""
        path = self._path(name)
        with self._naming_errors():
            try:
                sealed = path.read_bytes()
                os.utime(path)
            except FileNotFoundError:
                return None
        return sealed

    def put(self, name: str, sealed: bytes | memoryview) -> None:
        """Keep an object, and remove others if there is no room. Raises CacheUnusable."""
        if len(sealed) > self._limit_bytes:
            return
        path = self._path(name)
        pending = path.with_name(f"{secrets.token_hex(8)}.new")
        with self._naming_errors():
            try:
                with self._locked() as total_file:
                    if path.exists():
                        return
                    total = int(os.pread(total_file, 32, 0) or 0) + len(sealed)
                    if total > self._limit_bytes:
                        total = self._make_room(len(sealed)) + len(sealed)
                    # Before the object: a writer that is killed here leaves a total that is too
                    # large, and the next one that thinks there is no room counts anew.
                    os.pwrite(total_file, f"{total:<32}".encode(), 0)
                    pending.write_bytes(sealed)
                    pending.replace(path)
            finally:
                pending.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Forget an object. Raises CacheUnusable."""
        with self._naming_errors():
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace('/', '-')}{_SUFFIX}"

    def _make_room(self, num_bytes: int) -> int:
        """Remove the least recently read, and what killed writers left; the bytes that remain."""
        kept: list[tuple[int, int, Path]] = []
        for path in self._directory.iterdir():
            if path.suffix == _SUFFIX:
                found = path.stat()
                kept.append((found.st_mtime_ns, found.st_size, path))
            elif path.name != _TOTAL:
                path.unlink()
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total + num_bytes <= self._limit_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
        return total

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self._directory / _TOTAL, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _naming_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise CacheUnusable(
                f"{_FIELD}.directory: {self._directory} cannot be used ({error.strerror}): "
                f"{f'free space, or lower {_FIELD}.limit_bytes' if full else 'name another'}, "
                f"or remove {_FIELD} to do without"
            ) from error
