"""The access log: who touched which object, where, and what was refused.

One canonical JSON object a line, appended and never rewritten, in a Merkle tree after RFC 6962.
An entry names objects and never holds content or keys. docs/access-log.md specifies it and says
what it proves; `storage.log_checkpoint` signs it, `storage.log_verification` checks it.
"""

import contextlib
import getpass
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from storage.errors import StorageError
from storage.log_checkpoint import AuditConfig
from storage.log_file import LogFile
from storage.notary import Notary

RUN_ID_VARIABLE = "CONVOY_RUN_ID"
"""Environment variable that names the run in the access log."""

Action = Literal[
    "put",  # an object was placed in a region
    "get",  # an object was read
    "unwrap",  # a data key was unwrapped
    "generate",  # a data key was made
    "refuse",  # something was asked for and not allowed
    "rotate",  # a data key was wrapped anew, or the log handed over to another signing key
    "shred",  # a wrapped key was destroyed
    "register",  # a model version was registered
    "cross",  # something went from one region to another
    "open",  # a process began to write to the log
    "close",  # and ended: nothing of what it had to say is missing
]

_BATCHED = frozenset({"get", "put"})
_FLUSH_SECONDS = 1.0
_FLUSH_ENTRIES = 512
_MOST_PENDING = 8192


class AccessEntry(BaseModel):
    """One access, or one refusal. Names objects and never holds content or a key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    actor: str = Field(default_factory=cache(getpass.getuser))
    host: str = Field(default_factory=cache(socket.gethostname))
    region: str
    """Where the object lies or should have lain."""
    action: Action
    object: str
    """Its name in the store, or another name that tells nothing of its content."""
    artifact: str
    """The class of the object in the residency policy, for example "shard"."""
    num_bytes: int = Field(default=0, ge=0, lt=2**53)
    from_region: str = ""
    """Of a crossing, as `to_region`."""
    to_region: str = ""
    policy_digest: str = ""
    """SHA-256 of the residency policy that decided, in hex."""
    decision: Literal["allowed", "refused"]
    reason: str
    run_id: str = Field(default_factory=lambda: os.environ.get(RUN_ID_VARIABLE, ""))
    key_id: str = ""
    """URI of the wrapping key, where one was used."""
    writer: str = ""
    """The process that wrote the entry. The log sets it, as `sequence`."""
    sequence: int = Field(default=0, ge=0, lt=2**53)
    """Number of the entry among its writer's, from 0."""


class AccessLog:
    """A handle on a log, mode 0600, that many threads and processes may append to at once.

    All handles of a process on one file write through one writer. It is opened by the first entry
    and closed by `close` or the end of the process.
    """

    def __init__(
        self, path: Path, audit: AuditConfig | None = None, policy_digest: str = ""
    ) -> None:
        """With `audit`, a checkpoint is made within a long stage too. `policy_digest` goes into
        the entries that name none.
        """
        self._path = path.absolute()
        self._audit = audit
        self._policy_digest = policy_digest

    def append(self, entry: AccessEntry) -> None:
        """Append an entry. Gets and puts are on disk within a second or some 500 entries, all
        others when this returns.

        Raises StorageError if this entry or an earlier one cannot be recorded.
        """
        if self._policy_digest and not entry.policy_digest:
            entry = entry.model_copy(update={"policy_digest": self._policy_digest})
        while not _writer_of(self._path, self._audit).append(entry):
            continue  # another thread closed the writer meanwhile

    def flush(self) -> None:
        """Return when all that this process appended is on disk. Raises StorageError."""
        with _registry_lock:
            writer = _writers.get(self._path)
        if writer:
            writer.flush()

    def close(self) -> None:
        """Say in the log that this process has said all; a later entry opens it again."""
        with _registry_lock:
            writer = _writers.pop(self._path, None)
        if writer:
            try:
                writer.close()
            except StorageError:
                with _registry_lock:
                    _writers.setdefault(self._path, writer)
                raise

    def entries(self) -> Iterator[AccessEntry]:
        """Yield the accesses, oldest first; none if there is no log yet. Raises StorageError."""
        return (entry for _, entry in self.numbered() if entry.action not in ("open", "close"))

    def numbered(self) -> Iterator[tuple[int, AccessEntry]]:
        """Yield all entries with their numbers, from 0: the accesses, and what the log says of its
        writers. Raises StorageError."""
        self.flush()
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file):
                    yield number, parse_entry(line, number, self._path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise LogFile(self._path).unusable("read", error) from error


def encode_entry(fields: Mapping[str, str | int]) -> bytes:
    """The canonical JSON (RFC 8785) of an entry's fields: whole numbers and strings, ASCII keys.

    For those the standard library gives the same bytes as rfc8785, in a tenth of its time.
    """
    return json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def parse_entry(line: bytes, number: int, path: Path) -> AccessEntry:
    """Read a line. Raises StorageError naming the entry."""
    try:
        return AccessEntry.model_validate_json(line)
    except ValidationError:
        raise StorageError(
            f"the access log {path} holds no entry in line {number + 1}: it was edited or cut; "
            "`convoy audit verify` says more"
        ) from None


class _Writer:
    """One process's part of a log: numbers its entries, and writes them in batches by a thread."""

    def __init__(self, path: Path, audit: AuditConfig | None) -> None:
        self._file = LogFile(path)
        self._notary = Notary(path, audit) if audit else None
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._pending: list[AccessEntry] = [_of_log("open", self._name)]
        self._num_written = 0
        self._failed = False
        self._closed = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def append(self, entry: AccessEntry) -> bool:
        """Take the entry; False if the writer is closed."""
        with self._changed:
            if self._closed:
                return False
            self._pending.append(entry)
            num_pending = len(self._pending)
            may_wait = entry.action in _BATCHED and num_pending < _MOST_PENDING
            if may_wait and self._num_written and not self._failed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                    self._thread.start()
                elif num_pending in (1, _FLUSH_ENTRIES):
                    self._changed.notify()
                return True
        self.flush()
        return True

    def flush(self) -> None:
        with self._writing:
            with self._changed:
                batch = list(self._pending)
            if not batch:
                return
            lines = [self._encode(entry, i) for i, entry in enumerate(batch, self._num_written)]
            try:
                self._file.append(lines)
            except StorageError:
                self._failed = True
                raise
            with self._changed:
                self._failed = False
                del self._pending[: len(batch)]
                self._num_written += len(batch)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._pending.append(_of_log("close", self._name))
            self._changed.notify()
        if self._thread:
            self._thread.join()
            self._thread = None
        try:
            self.flush()
        except StorageError:
            with self._changed:
                self._pending.pop()
                self._closed = False  # for another try
            raise

    def _encode(self, entry: AccessEntry, sequence: int) -> bytes:
        fields = entry.model_dump(mode="json")
        return encode_entry(fields | {"writer": self._name, "sequence": sequence})

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending)
                self._changed.wait_for(
                    lambda: self._closed or len(self._pending) >= _FLUSH_ENTRIES, _FLUSH_SECONDS
                )
                if self._closed:
                    return
            try:
                self.flush()
                if self._notary:
                    self._notary.publish_when_due()
            except StorageError:
                # The next append or checkpoint tries again, and raises.
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _FLUSH_SECONDS)


def _of_log(action: Literal["open", "close"], name: str) -> AccessEntry:
    return AccessEntry(
        region="", action=action, object=name, artifact="log", decision="allowed", reason="writer"
    )


_writers: dict[Path, _Writer] = {}
_registry_lock = threading.Lock()
_is_closing_arranged = False


def _writer_of(path: Path, audit: AuditConfig | None) -> _Writer:
    with _registry_lock:
        if path not in _writers:
            _arrange_closing()
            _writers[path] = _Writer(path, audit)
        return _writers[path]


def _arrange_closing() -> None:
    """Close what is open when this process ends; atexit is not called in a forked worker."""
    global _is_closing_arranged
    if not _is_closing_arranged:
        from multiprocessing.util import Finalize

        Finalize(None, _close_all, exitpriority=0)
        _is_closing_arranged = True


def _close_all() -> None:
    with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
        for path in _writers:
            stack.callback(AccessLog(path).close)


def _forget_after_fork() -> None:
    """The parent writes what it had to say; a forked child begins as another writer."""
    global _registry_lock, _is_closing_arranged
    _registry_lock = threading.Lock()
    _is_closing_arranged = False
    _writers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
