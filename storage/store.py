"""Object stores: five verbs on bytes in one region."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from storage.errors import ObjectMissing, StoreRefused, StoreUnavailable
from storage.locations import FileLocation, parse_store
from storage.open_object import OpenObject
from storage.region import Region

Bytes = bytes | bytearray | memoryview
Content = Bytes | Iterator[Bytes]
"""What is put: bytes, or an iterator of parts of 8 MiB (the last one may be smaller)."""

CREDENTIALS_REMEDY = (
    "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN (or AWS_PROFILE), and "
    "that they may read, write and list this bucket"
)

_NAME = re.compile(r"[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*")
_PROBE_NAME = "convoy-probe"
_PROBE = b"Convoy writes this object to see whether the region can be written.\n"


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """The name and the size in bytes of an object."""

    name: str
    num_bytes: int


class ObjectStore(Protocol):
    """Bytes by name in one region.

    Names are relative paths of A-Z a-z 0-9 . _ = - between single slashes. Every verb raises
    StoreUnavailable, naming region, URL and remedy, when the store cannot do it.
    """

    def put(self, name: str, data: Content, *, overwrite: bool = True) -> None:
        """Write an object, whole or not at all: what an iterator raises leaves no object.

        With overwrite=False an object that is there already is left alone and ObjectExists is
        raised; of several such writers at once exactly one succeeds.
        """

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Read bytes start to end (exclusive; None is the end), as a slice would.

        Raises ObjectMissing.
        """

    def open(self, name: str) -> AbstractContextManager[OpenObject]:
        """Open a large object, all of which will be read. Raises ObjectMissing."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects in the folder `prefix` and below, or all, in order of name."""

    def exists(self, name: str) -> bool:
        """Say whether there is an object of that name."""


class KeyStore(ObjectStore, Protocol):
    """An object store whose envelopes can be wrapped anew and shredded. For `storage.rotation`."""

    def replace(self, name: str, old: bytes, new: bytes) -> None:
        """Put `new` in the place of `old`, whole or not at all.

        Raises ObjectChanged, and changes nothing, when the object is not `old` (any more).
        """

    def delete(self, name: str) -> None:
        """Remove the object with every version of it that the store keeps, if there is one.

        Raises StoreUnavailable, and removes nothing, where a lock on the object forbids it.
        """


def open_store(region: Region) -> KeyStore:
    """Open the store of a region. Nothing is written or reached yet."""
    location = parse_store(region.store)
    if isinstance(location, FileLocation):
        from storage.directory import Directory

        return Directory(region, location.path)
    from storage.clouds import open_bucket

    return open_bucket(region, location)


def check_store(region: Region) -> None:
    """Write and read back a small object, so that a broken store is found before any work.

    Raises StoreUnavailable.
    """
    store = open_store(region)
    store.put(_PROBE_NAME, _PROBE)
    try:
        found = store.get(_PROBE_NAME)
    except ObjectMissing:
        found = b""
    if found != _PROBE:
        raise unavailable(
            region, "does not return what was written to it", "check what serves this store"
        )


def checked_name(name: str) -> str:
    """Return the object name, or raise ValueError if it could leave the store or be ambiguous."""
    if not _NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"not an object name: {name!r}")
    return name


def checked_prefix(prefix: str) -> str:
    """Return the folder without its last slash, "" for all, or raise ValueError."""
    return checked_name(prefix.removesuffix("/")) if prefix else ""


def checked_range(start: int, end: int | None) -> None:
    """Raise ValueError for a range that counts from the end or runs backwards."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"not a byte range: {start} to {end}")


def unavailable(region: Region, what: str, remedy: str) -> StoreUnavailable:
    """Build the error that names the field, the URL and the remedy."""
    return StoreUnavailable(f"regions.{region.name}.store ({region.store}) {what}: {remedy}")


def refused(region: Region, what: str, remedy: str) -> StoreRefused:
    """Build the same error for what would be refused again."""
    return StoreRefused(str(unavailable(region, what, remedy)))
