"""The second place that an access log's checkpoints are copied to.

It is what makes the log proof against its own keeper: docs/access-log.md.
"""

import contextlib
from collections.abc import Iterator

from storage.errors import ObjectExists, StorageError, StoreUnavailable
from storage.log_checkpoint import Checkpoint
from storage.region import Region
from storage.signed_note import VerifierKey
from storage.store import ObjectStore, open_store

_FOLDER = "checkpoints"
_HANDOVERS = "handovers"
_KEY_NAME = "key"


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
