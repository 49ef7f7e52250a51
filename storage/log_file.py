"""The files of an access log, which many processes append to: entries, their hashes, the tree.

    NAME.jsonl    one entry a line
    NAME.hashes   the 32-byte leaf hash of each entry
    NAME.tree     where the last finished write ended: size, bytes and frontier, as JSON

A write goes to the hashes first, then to the entries, then to the tree, under a lock. So whoever
comes after a kill knows each line that a dead writer had begun, and takes no other for its own.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from storage.errors import StorageError
from storage.merkle import HASH_BYTES, Frontier, hash_leaf
from storage.private_file import replace_private_file


class _Tree(BaseModel, frozen=True, extra="forbid"):
    size: int
    num_bytes: int
    roots: tuple[str, ...]


@dataclass(frozen=True)
class LogEnd:
    """Where a log ends: its tree, and the bytes of its entries."""

    frontier: Frontier
    num_bytes: int

    @classmethod
    def decode(cls, content: bytes) -> "LogEnd":
        """Read what `encode` gave. Raises ValueError."""
        tree = _Tree.model_validate_json(content)
        end = cls(Frontier(tree.size, tuple(map(bytes.fromhex, tree.roots))), tree.num_bytes)
        if end.encode() != content:
            raise ValueError("it is not in canonical form")
        return end

    def encode(self) -> bytes:
        roots = tuple(root.hex() for root in self.frontier.roots)
        tree = _Tree(size=self.frontier.size, num_bytes=self.num_bytes, roots=roots)
        return tree.model_dump_json().encode()


class LogFile:
    """The entries of one log as lines of bytes. Every method raises StorageError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hashes_path = path.with_suffix(".hashes")
        self.tree_path = path.with_suffix(".tree")

    def append(self, lines: Sequence[bytes]) -> LogEnd:
        """Append lines (without their line ends), all or none, and sync them to disk."""
        leaves = [hash_leaf(line) for line in lines]
        with self._locked() as (entries, hashes):
            before = self._settle(entries, hashes)
            frontier = before.frontier.extend(leaves)
            content = b"".join(line + b"\n" for line in lines)
            end = LogEnd(frontier, before.num_bytes + len(content))
            try:
                _write(hashes, b"".join(leaves))
                _write(entries, content)
                replace_private_file(self.tree_path, end.encode())
            except OSError:
                # A full disk must not leave half an entry.
                os.ftruncate(entries, before.num_bytes)
                os.ftruncate(hashes, before.frontier.size * HASH_BYTES)
                raise
            return end

    def end(self) -> LogEnd:
        """Where the log ends now, once what a killed writer left is settled."""
        if not self.path.exists():
            return LogEnd(Frontier(), 0)
        with self._locked() as (entries, hashes):
            return self._settle(entries, hashes)

    def read_end(self) -> LogEnd:
        """The same without changing anything: for those who may only read."""
        try:
            with self.path.open("rb") as entries, self.hashes_path.open("rb") as hashes:
                return find_end(self.read_tree(), entries.fileno(), hashes.fileno(), self.path)
        except OSError as error:
            raise self.unusable("read", error) from error

    def read_tree(self) -> LogEnd:
        """The end that the last finished write noted."""
        try:
            return LogEnd.decode(self.tree_path.read_bytes())
        except FileNotFoundError:
            return LogEnd(Frontier(), 0)
        except ValueError:
            raise damaged(self.path, f"{self.tree_path.name} holds no tree") from None

    def unusable(self, verb: str, error: OSError) -> StorageError:
        """The error for a log that cannot be written or read."""
        return StorageError(
            f"the access log {self.path} cannot be {verb} ({error.strerror}): make it usable for "
            "this user and free space on its disk; nothing goes on without a record"
        )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[tuple[int, int]]:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                entries = os.open(self.path, flags, 0o600)
                stack.callback(os.close, entries)
                fcntl.flock(entries, fcntl.LOCK_EX)
                # Closing alone would leave it locked by a child that was forked meanwhile.
                stack.callback(fcntl.flock, entries, fcntl.LOCK_UN)
                hashes = os.open(self.hashes_path, flags, 0o600)
                stack.callback(os.close, hashes)
                yield entries, hashes
        except OSError as error:
            raise self.unusable("written", error) from error

    def _settle(self, entries: int, hashes: int) -> LogEnd:
        noted = self.read_tree()
        end = find_end(noted, entries, hashes, self.path)
        os.ftruncate(entries, end.num_bytes)
        os.ftruncate(hashes, end.frontier.size * HASH_BYTES)
        if end != noted:
            replace_private_file(self.tree_path, end.encode())
        return end


def find_end(noted: LogEnd, entries: int, hashes: int, path: Path) -> LogEnd:
    """Where a log ends, given what the last finished write noted and two open files.

    Lines after that are a killed writer's if their hashes were there before them; half a line and
    hashes without a line are not part of the log. Raises StorageError for anything else.
    """
    num_bytes = os.fstat(entries).st_size
    num_hash_bytes = os.fstat(hashes).st_size
    if num_bytes < noted.num_bytes or num_hash_bytes < noted.frontier.size * HASH_BYTES:
        raise damaged(path, f"its end is missing: it held {noted.frontier.size} entries")
    tail = os.pread(entries, num_bytes - noted.num_bytes, noted.num_bytes)
    *lines, rest = tail.split(b"\n")
    start = noted.frontier.size * HASH_BYTES
    begun = os.pread(hashes, num_hash_bytes - start, start)
    leaves = [hash_leaf(line) for line in lines]
    found = b"".join(leaves)
    if begun[: len(found)] != found or (rest and len(begun) < len(found) + HASH_BYTES):
        raise damaged(path, f"something was added after entry {noted.frontier.size - 1}")
    return LogEnd(noted.frontier.extend(leaves), num_bytes - len(rest))


def damaged(path: Path, what: str) -> StorageError:
    """The error for a log that is not as it was written."""
    return StorageError(
        f"the access log {path} was changed ({what}): `convoy audit verify` says more. Keep its "
        "files as evidence; docs/access-log.md says how to begin a new log"
    )


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
