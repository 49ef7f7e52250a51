"""The access log: who touched which object, where, and what was refused.

One canonical JSON object a line, appended and never rewritten. An entry names objects and never
holds content or keys. It is a plain file: it does not prove by itself that nobody removed a line.
"""

import fcntl
import getpass
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from storage.canonical import canonical_json
from storage.errors import StorageError

RUN_ID_VARIABLE = "CONVOY_RUN_ID"
"""Environment variable that names the run in the access log."""

Action = Literal[
    "put",  # an object was placed in a region
    "get",  # an object was read
    "unwrap",  # a data key was unwrapped
    "generate",  # a data key was made
    "refuse",  # something was asked for and not allowed
    "rotate",  # a data key was wrapped anew
    "shred",  # a wrapped key was destroyed
    "register",  # a model version was registered
    "cross",  # something went from one region to another
]


class AccessEntry(BaseModel):
    """One access, or one refusal. Names objects and never holds content or a key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    actor: str = Field(default_factory=getpass.getuser)
    host: str = Field(default_factory=socket.gethostname)
    region: str
    """Where the object lies or should have lain."""
    action: Action
    object: str
    """Its name in the store, or another name that tells nothing of its content."""
    artifact: str
    """The class of the object in the residency policy, for example "shard"."""
    num_bytes: int = 0
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


class AccessLog:
    """An append-only file of entries, mode 0600, that many processes may append to at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, entry: AccessEntry) -> None:
        """Append an entry and sync it to disk. Raises StorageError if it cannot be recorded."""
        line = canonical_json(entry.model_dump(mode="json")) + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                _append_whole(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StorageError(
                f"the access log {self._path} cannot be written ({error.strerror}): make it "
                "writable and free space on its disk; nothing goes on without a record"
            ) from error

    def entries(self) -> Iterator[AccessEntry]:
        """Yield the entries, oldest first; none if there is no log yet. Raises StorageError."""
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield self._entry(line, number)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(
                f"the access log {self._path} cannot be read ({error.strerror}): make it readable"
            ) from error

    def _entry(self, line: bytes, number: int) -> AccessEntry:
        try:
            return AccessEntry.model_validate_json(line)
        except ValidationError:
            raise StorageError(
                f"the access log {self._path} holds no entry in line {number}: it was edited or "
                "cut; restore it from a copy"
            ) from None


def _append_whole(descriptor: int, line: bytes) -> None:
    """Append the line or leave the file as it was: a full disk must not leave half an entry."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    num_bytes_before = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, line)
        if written < len(line):
            os.write(descriptor, line[written:])
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, num_bytes_before)
        raise
