"""A store in a local directory: each object a file, written whole and synced to disk.

Plain system calls rather than obstore, whose local store does not sync: an object that `put`
returned from must survive a power cut, for commits are ordered by it.
"""

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from storage.errors import ObjectChanged, ObjectExists, ObjectMissing, StoreUnavailable
from storage.open_object import OpenObject, Pieces
from storage.private_file import sync_directory
from storage.region import Region
from storage.store import (
    Bytes,
    Content,
    ObjectInfo,
    checked_name,
    checked_prefix,
    checked_range,
    refused,
    unavailable,
)

# No object name holds this mark, so a file left by a killed writer is never taken for one.
_UNFINISHED = "~"

_REMEDIES = {
    errno.ENOSPC: "free space on that disk, or set another directory",
    errno.EDQUOT: "raise the disk quota, or set another directory",
    errno.EFBIG: "raise the limit on file size (ulimit -f)",
    errno.EROFS: "mount it writable, or set another directory",
    errno.EACCES: "give this user read and write permission, or set another directory",
    errno.EPERM: "give this user read and write permission, or set another directory",
}


class Directory:
    """Objects as files below a directory, made with mode 0700 when the first is put."""

    def __init__(self, region: Region, root: Path) -> None:
        self._region = region
        self._root = root
        self._pieces = Pieces()

    def put(self, name: str, data: Content, *, overwrite: bool = True) -> None:
        path = self._root / checked_name(name)
        try:
            _make_directory(path.parent)
            with _unfinished(path) as (unfinished, descriptor):
                _write_synced(descriptor, data)
                if overwrite:
                    unfinished.replace(path)
                else:
                    self._link_new(unfinished, path, name)
            sync_directory(path.parent)
        except OSError as error:
            raise self._refusal(f"cannot write {name}", error) from error

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        checked_range(start, end)
        with self._reading(name) as file:
            file.seek(start)
            size = os.fstat(file.fileno()).st_size
            stop = size if end is None else min(end, size)
            return _read_fully(file.fileno(), max(0, stop - start))

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[OpenObject]:
        with self._reading(name) as file, self._pieces.open(file) as found:
            yield found

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[FileIO]:
        try:
            with (self._root / checked_name(name)).open("rb", buffering=0) as file:
                yield file
        except (FileNotFoundError, IsADirectoryError):
            raise ObjectMissing(
                f"regions.{self._region.name}.store ({self._region.store}) has no {name}"
            ) from None
        except OSError as error:
            raise self._refusal(f"cannot read {name}", error) from error

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        folder = self._root / checked_prefix(prefix)
        try:
            found = [
                ObjectInfo(path.relative_to(self._root).as_posix(), path.stat().st_size)
                for path in _files_below(folder)
            ]
        except OSError as error:
            raise self._refusal("cannot be listed", error) from error
        yield from sorted(found)

    def exists(self, name: str) -> bool:
        try:
            return (self._root / checked_name(name)).is_file()
        except OSError as error:
            raise self._refusal(f"cannot look up {name}", error) from error

    def replace(self, name: str, old: bytes, new: bytes) -> None:
        path = self._root / checked_name(name)
        try:
            with _locked(path.parent):
                if not path.is_file() or path.read_bytes() != old:
                    raise ObjectChanged(
                        f"regions.{self._region.name}.store ({self._region.store}): {name} was "
                        "changed or removed meanwhile: run the command again"
                    )
                self.put(name, new)
        except OSError as error:
            raise self._refusal(f"cannot replace {name}", error) from error

    def delete(self, name: str) -> None:
        path = self._root / checked_name(name)
        try:
            if path.parent.is_dir():
                with _locked(path.parent):
                    path.unlink(missing_ok=True)
                    sync_directory(path.parent)
        except OSError as error:
            raise self._refusal(f"cannot remove {name}", error) from error

    def _link_new(self, written: Path, path: Path, name: str) -> None:
        try:
            path.hardlink_to(written)
        except FileExistsError:
            raise ObjectExists(
                f"regions.{self._region.name}.store ({self._region.store}) already has {name}"
            ) from None

    def _refusal(self, what: str, error: OSError) -> StoreUnavailable:
        what = f"{what} ({error.strerror})"
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            # As where a share is not mounted yet: it may be, by the next try.
            return unavailable(
                self._region, what, "remove the file that stands where a directory should be"
            )
        if remedy := _REMEDIES.get(error.errno or 0):
            return refused(self._region, what, remedy)
        return unavailable(self._region, what, "check the directory and its disk")


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[tuple[Path, int]]:
    """Open an empty file beside the object, for this writer alone, and remove it in the end.

    What a killed writer left is taken over by the next one of that object, so that leftovers do
    not grow in number. A living writer holds a lock on its file, and others go to the next.
    """
    for number in itertools.count():
        unfinished = path.with_name(f"{path.name}{_UNFINISHED}{number}")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if not _take_over(unfinished, descriptor):
                continue
            try:
                yield unfinished, descriptor
            finally:
                # After a rename the name may be another writer's already.
                if _is_named(descriptor, unfinished):
                    unfinished.unlink()
            return
        finally:
            os.close(descriptor)


def _take_over(unfinished: Path, descriptor: int) -> bool:
    """Lock and empty the file, unless another has it, or gave it the object's name meanwhile."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not _is_named(descriptor, unfinished):
        return False
    if os.fstat(descriptor).st_nlink > 1:
        # Its writer was killed when the file already was the object: only this name must go.
        unfinished.unlink()
        return False
    os.ftruncate(descriptor, 0)
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _write_synced(descriptor: int, data: Content) -> None:
    for part in [data] if isinstance(data, Bytes) else data:
        left = memoryview(part).cast("B")
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, each private and synced into the one above it."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(path.parent)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory against others that replace or delete in it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_fully(descriptor: int, num_bytes: int) -> bytes:
    data = os.read(descriptor, num_bytes)
    while len(data) < num_bytes and (more := os.read(descriptor, num_bytes - len(data))):
        data += more
    return data


def _files_below(folder: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(folder, onerror=_raise_unless_absent):
        yield from (Path(directory, name) for name in names if _UNFINISHED not in name)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
