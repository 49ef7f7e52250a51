"""The errors of Convoy and of its storage package.

ConvoyError                 anything a user can mend; the message says what, where and how
└── StorageError
    ├── StoreUnavailable    a store that cannot be reached, refuses or cannot be written
    │   └── StoreRefused    one that answers, and would refuse the same again: nothing to retry
    ├── ClaimRefuted        a bucket or key that is not what its region claims
    ├── ObjectMissing       the store answers, and has no object of that name
    ├── ObjectExists        a put that must not replace anything found an object
    ├── ObjectChanged       a replacement found another object than it was made for
    ├── KeyShredded         the data key of a dataset version was destroyed on purpose
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


class StoreRefused(StoreUnavailable):
    """A store answers and refuses, and would do so again: someone has to change something."""


class ClaimRefuted(StorageError):
    """A bucket or a key is not what its region claims to be."""


class ObjectMissing(StorageError):
    """The store answers, and has no object of that name."""


class ObjectExists(StorageError):
    """A put that must not replace anything found an object of that name."""


class ObjectChanged(StorageError):
    """A replacement found another object, or none, in place of the one it was made for."""


class KeyShredded(StorageError):
    """The data key of a dataset version in a region was destroyed by `convoy keys shred`."""


class KeyringError(StorageError):
    """A wrapping key cannot be reached, is missing, or refuses this encryption context."""


class SealBroken(StorageError):
    """Bytes do not authenticate: they were changed, cut, swapped, or belong elsewhere."""
