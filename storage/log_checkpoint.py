"""Checkpoints of an access log: its size and root, signed, here and in a second place.

A checkpoint is a signed note after https://c2sp.org/tlog-checkpoint. The second place, the
witness, is what makes the log proof against its own keeper: docs/access-log.md.
"""

import base64
import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, PositiveInt, field_validator

from storage.errors import ObjectExists, SealBroken, StorageError, StoreUnavailable
from storage.key_handover import sign_handover
from storage.locations import FileLocation, MemoryLocation, parse_store
from storage.log_file import LogFile, damaged
from storage.merkle import HASH_BYTES
from storage.private_file import create_private_file, replace_private_file, sync_directory
from storage.region import Region
from storage.signed_note import SigningKey, VerifierKey, open_note
from storage.store import ObjectStore, open_store

_FOLDER = "checkpoints"
_HANDOVERS = "handovers"
_KEY_NAME = "key"
_TEXT = re.compile(r"(?P<origin>[^\n]+)\n(?P<size>0|[1-9][0-9]{0,18})\n(?P<root>[A-Za-z0-9+/=]+)\n")


class AuditConfig(BaseModel, frozen=True, extra="forbid"):
    """How the access log is signed, and where its checkpoints are copied."""

    signing_key: Path = Path(".convoy/keys/audit.key")
    """The file of the Ed25519 key, mode 0600, made by the first checkpoint."""
    witness: str = "file:.convoy/witness"
    """URL of the store that gets every checkpoint; logs may share it. It proves something only
    where those who can change the log cannot change it."""
    region: str | None = None
    """The region that the witness is in: the policy is asked whether it may have a `log`. Needed
    where it is not on this machine."""
    checkpoint_entries: PositiveInt = 10_000
    """A checkpoint is made at the end of a stage, and within it after so many entries."""

    @field_validator("witness")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parse_store(url)
        return url

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the witness is a folder, or memory."""
        return isinstance(parse_store(self.witness), FileLocation | MemoryLocation)


@dataclass(frozen=True)
class Checkpoint:
    """What a log was at one moment."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def open_checkpoint(note: bytes, key: VerifierKey) -> Checkpoint:
    """Check a note's signature and read it. Raises SealBroken."""
    matched = _TEXT.fullmatch(open_note(note, key))
    root = base64.b64decode(matched["root"]) if matched else b""
    if matched is None or len(root) != HASH_BYTES or matched["origin"] != key.name:
        raise SealBroken("it is no checkpoint of this log")
    return Checkpoint(matched["origin"], int(matched["size"]), root)


class Notary:
    """Makes the checkpoints of one log. Every method raises StorageError."""

    def __init__(self, log: Path, config: AuditConfig) -> None:
        self._file = LogFile(log.absolute())
        self._newest = log.absolute().with_suffix(".checkpoint")
        self._key_path = config.signing_key.absolute()
        self._next_path = self._key_path.with_name(f"{self._key_path.name}.next")
        self._witness = Witness(config.witness)
        self._checkpoint_entries = config.checkpoint_entries

    def publish_when_due(self) -> None:
        """Publish if `checkpoint_entries` have come since the newest checkpoint."""
        size = self._file.read_tree().frontier.size
        if size >= self._checkpoint_entries:
            newest = self.newest(self._signing_key().verifier)
            if size - (newest.size if newest else 0) >= self._checkpoint_entries:
                self.publish()

    def publish(self) -> Checkpoint | None:
        """Sign what the log is now and copy that to the second place; None of an empty log.

        Costs O(log n). Does nothing but look when the newest checkpoint says it already.
        """
        end = self._file.end()
        if end.frontier.size == 0 and not self._newest.exists():
            return None
        key = self._signing_key()
        checkpoint = Checkpoint(key.name, end.frontier.size, end.frontier.root)
        newest = self.newest(key.verifier)
        if newest and (
            newest.size > checkpoint.size
            or (newest.size == checkpoint.size and newest.root != checkpoint.root)
        ):
            raise damaged(self._file.path, f"its newest checkpoint says {newest.size} entries")
        if newest == checkpoint and self._witness.holds(checkpoint):
            return checkpoint
        note = key.sign(checkpoint.text)
        try:
            if newest != checkpoint:
                replace_private_file(self._newest, note)
        except OSError as error:
            raise self._file.unusable("written", error) from error
        self._witness.put(checkpoint, note, key.verifier)
        return checkpoint

    def rotate(self) -> VerifierKey:
        """Hand the log over to a new key, which this gives; the old one is removed.

        What it does is done again where an earlier call was killed; until then nothing is signed.
        """
        if not self._next_path.exists():
            if self.publish() is None:
                raise StorageError("the access log is empty: there is no key to rotate")
            name = self._signing_key().name
            self._create_key(self._next_path, name)
        old, new = read_signing_key(self._key_path), read_signing_key(self._next_path)
        checkpoint = self._newest_of(old.verifier, new.verifier)
        note = sign_handover(checkpoint.size, old, new)
        self._witness.put_handover(checkpoint, note)
        try:
            replace_private_file(self._newest, new.sign(checkpoint.text))
            self._next_path.replace(self._key_path)
            sync_directory(self._key_path.parent)
        except OSError as error:
            raise self._file.unusable("written", error) from error
        return new.verifier

    def _newest_of(self, *keys: VerifierKey) -> Checkpoint:
        """The newest checkpoint that lies here, which one of the keys signed."""
        for key in keys[:-1]:
            with contextlib.suppress(SealBroken, OSError):
                return open_checkpoint(self._newest.read_bytes(), key)
        newest = self.newest(keys[-1])
        if newest is None:
            raise damaged(self._file.path, f"{self._newest.name} is missing")
        return newest

    def newest(self, key: VerifierKey) -> Checkpoint | None:
        """The newest checkpoint that lies here."""
        try:
            return open_checkpoint(self._newest.read_bytes(), key)
        except FileNotFoundError:
            return None
        except SealBroken as error:
            raise damaged(self._file.path, f"{self._newest.name}: {error}") from None

    def _signing_key(self) -> SigningKey:
        """The key; made now, unless a checkpoint says that there was one."""
        if self._next_path.exists():
            raise StorageError(
                f"audit.signing_key ({self._key_path}): its rotation was not finished: run "
                "`convoy audit rotate`"
            )
        if not self._key_path.exists():
            if self._newest.exists():
                raise StorageError(
                    f"audit.signing_key ({self._key_path}) is missing: restore it from a backup; "
                    "docs/access-log.md says how to begin a new log"
                )
            self._create_key(self._key_path, f"convoy/{secrets.token_hex(8)}")
        return read_signing_key(self._key_path)

    def _create_key(self, path: Path, name: str) -> None:
        key = SigningKey(name, secrets.token_bytes(32))
        create_private_file(path, f"{key.encode()}\n".encode())


class Witness:
    """The second place, which several logs may share: every checkpoint of each, in a folder named
    as its key, and the key that they are checked with. Every method raises StorageError."""

    def __init__(self, url: str) -> None:
        self._url = url
        # A region has a key; nothing is sealed here.
        self._store: ObjectStore = open_store(
            Region(name="witness", jurisdiction="none", store=url, wrapping_key="file:none")
        )

    def put(self, checkpoint: Checkpoint, note: bytes, key: VerifierKey) -> None:
        """Place a checkpoint; what is there is never replaced."""
        try:
            self._put_once(f"{key.name}/{_KEY_NAME}", f"{key}\n".encode())
        except StorageError:
            if not self._is_handed_over(key):
                raise
        self._put_once(_name(checkpoint), note)

    def _is_handed_over(self, key: VerifierKey) -> bool:
        """Whether the first key, which lies there, gave way to this one or another."""
        return any(f"\n{key}\n".encode() in note for _, note in self.handovers(key))

    def put_handover(self, checkpoint: Checkpoint, note: bytes) -> None:
        """Place the hand-over of a log's key at that size; what is there is never replaced."""
        self._put_once(f"{checkpoint.origin}/{_HANDOVERS}/{checkpoint.size:020d}", note)

    def handovers(self, key: VerifierKey) -> list[tuple[str, bytes]]:
        """Names and notes of all hand-overs of a log's key, by size."""
        with self._named():
            names = [info.name for info in self._store.list(f"{key.name}/{_HANDOVERS}")]
            return [(name, self._store.get(name)) for name in names]

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint of that log and size is there."""
        with self._named():
            return self._store.exists(_name(checkpoint))

    def checkpoints(self, key: VerifierKey) -> list[tuple[str, bytes]]:
        """Names and notes of all checkpoints of a log, by size."""
        with self._named():
            names = [info.name for info in self._store.list(f"{key.name}/{_FOLDER}")]
            return [(name, self._store.get(name)) for name in names]

    def logs(self) -> list[VerifierKey]:
        """The keys of the logs that have checkpoints there."""
        with self._named():
            names = [i.name for i in self._store.list() if i.name.endswith(f"/{_KEY_NAME}")]
            contents = {name: self._store.get(name) for name in names}
        try:
            return [VerifierKey.parse(c.decode().removesuffix("\n")) for c in contents.values()]
        except ValueError:
            raise StorageError(
                f"audit.witness ({self._url}): one of {', '.join(names)} is no verifier key: it "
                "was changed"
            ) from None

    def _put_once(self, name: str, content: bytes) -> None:
        with self._named():
            try:
                self._store.put(name, content, overwrite=False)
            except ObjectExists:
                if self._store.get(name) != content:
                    raise StorageError(
                        f"audit.witness ({self._url}) holds another {name}: one of the two was "
                        "changed; `convoy audit verify` says more"
                    ) from None

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the store name the field of params.yaml that it comes from."""
        try:
            yield
        except StoreUnavailable as error:
            raise StoreUnavailable(
                str(error).replace("regions.witness.store", "audit.witness")
            ) from None
        except ValueError as error:  # the name of a key that was not made here
            raise StorageError(f"audit.witness ({self._url}): {error}") from None


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.origin}/{_FOLDER}/{checkpoint.size:020d}"


def read_signing_key(path: Path) -> SigningKey:
    """Read the key file. Raises StorageError, which repeats none of it."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise StorageError(
            f"audit.signing_key ({path}) cannot be read ({error.strerror}): restore it, or give "
            "it to this user"
        ) from None
    if mode & 0o077:
        raise StorageError(
            f"audit.signing_key ({path}) has mode {mode:04o}, open to other users: run "
            f"chmod 600 {path}"
        )
    try:
        return SigningKey.parse(content.decode().removesuffix("\n"))
    except ValueError:
        raise StorageError(
            f"audit.signing_key ({path}) holds no signing key: restore it from a backup"
        ) from None
