"""Keyrings: two verbs on data keys, generate and unwrap, both under an encryption context.

A data key seals objects. It exists in the clear only in memory; what is stored is the key wrapped
by the wrapping key of a region. The encryption context is readable, goes with each request, and
a key unwraps under the context it was generated with and under no other.
"""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from storage.canonical import canonical_json
from storage.errors import KeyringError
from storage.locations import FileLocation, KmsLocation, parse_wrapping_key
from storage.private_file import (
    create_private_file,
    replace_private_file,
    sync_directory,
)
from storage.region import Region

EncryptionContext = Mapping[str, str]

DATA_KEY_BYTES = 32
_NONCE_BYTES = 12
_WRAPPED_BYTES = _NONCE_BYTES + DATA_KEY_BYTES + 16


@dataclass(frozen=True, slots=True)
class DataKey:
    """A fresh data key: 32 bytes in the clear, and the same key wrapped."""

    plaintext: bytes = field(repr=False)
    wrapped: bytes


class Keyring(Protocol):
    """Makes data keys and unwraps them. Both verbs raise KeyringError."""

    def generate(self, context: EncryptionContext) -> DataKey:
        """Make a fresh data key, wrapped under this context."""

    def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        """Return the 32 bytes of a data key that was generated under this context."""


class RotatingKeyring(Keyring, Protocol):
    """A keyring that knows the wrapping key before the present one. For `storage.rotation`."""

    def rewrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        """Return the same data key, wrapped by the present wrapping key under the same context."""


def open_keyring(region: Region) -> RotatingKeyring:
    """Open the wrapping key of a region. Nothing is created or reached yet.

    Raises KeyringError if the environment lacks what a key service needs.
    """
    location = parse_wrapping_key(region.wrapping_key)
    if isinstance(location, FileLocation):
        return FileKeyring(region, location.path)
    if isinstance(location, KmsLocation):
        from storage.kms import KmsKeyring

        return KmsKeyring(region, location)
    from storage.vault import VaultKeyring

    return VaultKeyring(region, location)


def check_keyring(region: Region, *, may_create: bool = True) -> None:
    """Wrap and unwrap a key that is thrown away, so that a broken keyring is found in time.

    It must also refuse another context: a Vault key without derivation, for one, ignores it.
    With may_create=False a key file that is missing is an error, and none is made in its place.
    Raises KeyringError.
    """
    keyring = open_keyring(region)
    if not may_create and isinstance(keyring, FileKeyring):
        keyring.require_key()
    context = {"region": region.name, "jurisdiction": region.jurisdiction, "purpose": "check"}
    data_key = keyring.generate(context)
    if keyring.unwrap(data_key.wrapped, context) != data_key.plaintext:
        raise keyring_error(region, "returns another key than it wrapped", "use another key")
    try:
        keyring.unwrap(data_key.wrapped, context | {"purpose": "other"})
    except KeyringError:
        return
    raise keyring_error(
        region,
        "ignores the encryption context",
        "use a key that is bound to it (for a Vault transit key: derived=true)",
    )


class FileKeyring:
    """A wrapping key in a local file of mode 0600; the embedded default.

    The file holds 32 random bytes and is made by the first `generate`. A data key is wrapped by
    AES-256-GCM with a random nonce, the canonical JSON of the context as associated data:
    nonce (12 bytes), ciphertext (32), tag (16).

    `renew` puts a new key in the file and keeps the one before in FILE.retiring, which unwraps
    until `retire` removes it. Killed at any moment, either can be called again.
    """

    def __init__(self, region: Region, path: Path) -> None:
        self._region = region
        self._path = path

    def generate(self, context: EncryptionContext) -> DataKey:
        with self._explained("cannot be created"):
            if not self._path.exists():
                create_private_file(self._path, secrets.token_bytes(DATA_KEY_BYTES))
        plaintext = secrets.token_bytes(DATA_KEY_BYTES)
        return DataKey(plaintext, self._wrap(plaintext, context))

    def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        keys = [self._read_key(self._path)]
        if self._retiring.exists():
            keys.append(self._read_key(self._retiring))
        for key in keys:
            data_key = _open(key, wrapped, context)
            if data_key is not None:
                return data_key
        raise self._error(
            f"does not unwrap this data key under the context {dict(context)}",
            f"restore the {self._path} that wrapped it; a data key opens only for the dataset, "
            "version, region and jurisdiction it was made for",
        )

    def rewrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
        return self._wrap(self.unwrap(wrapped, context), context)

    def renew(self) -> None:
        """Put a fresh wrapping key in the file; the one before still unwraps. Raises KeyringError.

        If a renewal was not followed by `retire`, it is that one which goes on.
        """
        present = self._read_key(self._path)
        with self._explained("cannot be renewed"):
            if not self._retiring.exists():
                self._retiring.hardlink_to(self._path)
                sync_directory(self._path.parent)
            if self._read_key(self._retiring) == present:
                replace_private_file(self._path, secrets.token_bytes(DATA_KEY_BYTES))
                sync_directory(self._path.parent)

    def retire(self) -> None:
        """Remove the key before, when nothing is wrapped by it any more. Raises KeyringError."""
        with self._explained("cannot be retired"):
            self._retiring.unlink(missing_ok=True)
            sync_directory(self._path.parent)

    def require_key(self) -> None:
        """Raise KeyringError unless the key file is there and in order."""
        self._read_key(self._path)

    @property
    def _retiring(self) -> Path:
        return self._path.with_name(f"{self._path.name}.retiring")

    def _wrap(self, plaintext: bytes, context: EncryptionContext) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = secrets.token_bytes(_NONCE_BYTES)
        wrapping_key = AESGCM(self._read_key(self._path))
        return nonce + wrapping_key.encrypt(nonce, plaintext, canonical_json(context))

    def _read_key(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                key = file.read(DATA_KEY_BYTES + 1)
        except FileNotFoundError:
            raise self._error(
                "is missing",
                f"restore {path} from your backup; without it what it wrapped stays sealed "
                "(to begin anew with another key, give the region another store as well)",
            ) from None
        except OSError as error:
            raise self._error(
                f"cannot be read ({error.strerror})", f"give this user {path}"
            ) from error
        if mode & 0o077:
            raise self._error(f"has mode {mode:04o}, open to other users", f"run chmod 600 {path}")
        if len(key) != DATA_KEY_BYTES:
            raise self._error("does not hold 32 bytes", f"restore {path} from your backup")
        return key

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(
                f"{what} ({error.strerror})",
                f"make {self._path.parent} a directory that this user can write",
            ) from error

    def _error(self, what: str, remedy: str) -> KeyringError:
        return keyring_error(self._region, what, remedy)


def keyring_error(region: Region, what: str, remedy: str) -> KeyringError:
    """Build the error that names the field, the URL and the remedy."""
    return KeyringError(
        f"regions.{region.name}.wrapping_key ({region.wrapping_key}) {what}: {remedy}"
    )


def _open(key: bytes, wrapped: bytes, context: EncryptionContext) -> bytes | None:
    """The data key, or None if it was not wrapped by this key under this context."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce, sealed = wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:]
    if len(wrapped) != _WRAPPED_BYTES:
        return None
    try:
        return AESGCM(key).decrypt(nonce, sealed, canonical_json(context))
    except InvalidTag:
        return None
