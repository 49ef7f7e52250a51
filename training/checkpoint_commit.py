"""Which checkpoints there are: their markers, on this machine's disk and in the region's store.

What has no marker does not exist. Loads no torch.
"""

import contextlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import rfc8785
from pydantic import AwareDatetime, BaseModel, NonNegativeInt, ValidationError

from storage.envelope import authenticate
from storage.errors import ObjectMissing
from storage.store import KeyStore
from training.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""The folder in a run's directory."""
MARKER = "committed.json"
_PREFIX = "checkpoints"


class Commit(BaseModel, frozen=True, extra="forbid"):
    """What a commit marker says."""

    format: Literal["convoy-checkpoint-v1"] = "convoy-checkpoint-v1"
    step: int
    """Steps that were done."""
    cursor: int
    """First global sample position that was not used."""
    fingerprint: str
    """Of the run: the digest of `identity`."""
    identity: dict[str, Any] = {}
    """What of workload, manifest and config the result depends on, to be read and compared."""
    layout: dict[str, int] = {}
    """The degrees of parallelism that wrote it. Any others may load it."""
    loss: float | None = None
    """Training loss, the mean over the last window of the log."""
    time: AwareDatetime
    running_seconds: float = 0.0
    """What the run trained until then, over all its starts."""
    num_resumes: NonNegativeInt = 0
    """How often the run went on from a checkpoint before."""
    fencing_token: NonNegativeInt = 0
    """Which world wrote it: of two that believe they are the run, the higher one is."""
    files: dict[str, int]
    """Bytes of each sealed file."""
    mac: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())

    def sign(self, key: bytes) -> "Commit":
        """The same with its MAC under the data key."""
        return self.model_copy(update={"mac": authenticate(key, self._content)})

    def is_signed(self, key: bytes) -> bool:
        """Whether its MAC is that of the data key, and nothing was changed."""
        return hmac.compare_digest(authenticate(key, self._content), self.mac)

    @property
    def _content(self) -> bytes:
        return rfc8785.dumps(self.model_dump(mode="json", exclude={"mac"}))


@dataclass(frozen=True)
class Found:
    """A committed checkpoint, and where it is."""

    name: str
    commit: Commit
    on_disk: bool
    in_store: bool

    @property
    def age(self) -> tuple[int, AwareDatetime]:
        """What the newest has most of."""
        return self.commit.step, self.commit.time


def store_folder(run: str) -> str:
    """The folder of a run's checkpoints in a store; a run is named as its directory."""
    return f"{_PREFIX}/{run}"


def find_on_disk(directory: Path) -> list[Found]:
    """The committed checkpoints in a run's folder, oldest first; nothing has proved their markers.

    Raises CheckpointError for a marker that is none.
    """
    markers = list(directory.glob(f"step-*/{MARKER}"))
    commits = {path.parent.name: parse_commit(path.read_bytes(), path) for path in markers}
    return _sorted(Found(name, commit, True, False) for name, commit in commits.items())


def find_in_store(store: KeyStore, run: str) -> list[Found]:
    """The same for those in a region's store. Raises StoreUnavailable too."""
    commits: dict[str, Commit] = {}
    for info in store.list(store_folder(run)):
        folder, _, file = info.name.rpartition("/")
        if file == MARKER:
            with contextlib.suppress(ObjectMissing):  # its run removed it meanwhile
                commits[folder.rpartition("/")[2]] = parse_commit(store.get(info.name), info.name)
    return _sorted(Found(name, commit, False, True) for name, commit in commits.items())


def merge_found(on_disk: Iterable[Found], in_store: Iterable[Found]) -> list[Found]:
    """Each once, oldest first, with all the places where it is."""
    found = {one.name: one for one in on_disk}
    for one in in_store:
        found[one.name] = replace(found.get(one.name, one), in_store=True)
    return _sorted(found.values())


def _sorted(found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda one: one.age)


def parse_commit(content: bytes, where: Path | str) -> Commit:
    """A marker, which nothing has proved. Raises CheckpointError when it is none."""
    try:
        return Commit.model_validate_json(content)
    except ValidationError as error:
        raise CheckpointError(
            f"{where} is not the marker of a checkpoint that this release reads "
            f"({error.errors()[0]['msg']}): delete its directory and run `convoy stage train`, "
            "which goes on from the one before it"
        ) from None


def remove_stored(store: KeyStore, folder: str) -> None:
    """Remove all objects of a folder, markers first. Raises StoreUnavailable."""
    names = [info.name for info in store.list(folder)]
    for name in sorted(names, key=lambda name: not name.endswith(f"/{MARKER}")):
        store.delete(name)
