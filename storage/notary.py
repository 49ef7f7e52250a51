"""Who signs what an access log is, here and in a second place: docs/access-log.md."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from storage.errors import SealBroken, StorageError
from storage.key_handover import sign_handover
from storage.log_checkpoint import AuditConfig, Checkpoint, open_checkpoint
from storage.log_file import LogFile, damaged
from storage.private_file import create_private_file, replace_private_file, sync_directory
from storage.signed_note import SigningKey, VerifierKey
from storage.witness import Witness


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
