"""The errors of Convoy and of its storage package.

ConvoyError                 anything a user can mend; the message says what, where and how
└── StorageError
    ├── StoreUnavailable    a store that cannot be reached, refuses or cannot be written
    ├── ObjectMissing       the store answers, and has no object of that name
    ├── ObjectExists        a put that must not replace anything found an object
    ├── KeyringError        a wrapping key that cannot be reached, is missing or refuses a context
    └── SealBroken          bytes that do not authenticate: changed, cut, swapped or misplaced

No message holds a secret or a plaintext.
"""

from pathlib import Path


class ConvoyError(Exception):
    """The root of every error that Convoy raises for its user.

    detail: a file on this machine with what the message must not carry elsewhere, such as the text
    of an exception of the user's own code, which may quote a record.
    """

    def __init__(self, message: str, *, detail: Path | None = None) -> None:
        super().__init__(message)
        self.detail = detail


class StorageError(ConvoyError):
    """Something about bytes in a place, or about the keys that seal them."""


class StoreUnavailable(StorageError):
    """A store cannot be reached, refuses its credentials, or cannot be written."""


class ObjectMissing(StorageError):
    """The store answers, and has no object of that name."""


class ObjectExists(StorageError):
    """A put that must not replace anything found an object of that name."""


class KeyringError(StorageError):
    """A wrapping key cannot be reached, is missing, or refuses this encryption context."""


class SealBroken(StorageError):
    """Bytes do not authenticate: they were changed, cut, swapped, or belong elsewhere."""
