"""The files of checkpoints: sealed, on this machine's disk and in the region's store, marker last.

A checkpoint is a directory of sealed objects (docs/format.md) under the dataset version's data key
in the region, and a readable marker with a MAC under a key derived from it. So shredding that
dataset in that region shreds the checkpoints made of it. No directory is ever written twice, and
what has no marker does not exist: a kill at any moment leaves the earlier ones whole. Loads no
torch.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from data.sealed_shards import SealedShards, record_access
from storage.access_log import Action
from storage.buffers import Buffers
from storage.envelope import associated_data
from storage.errors import ObjectMissing, SealBroken
from storage.private_file import sync_directory
from storage.sealed import PART_BYTES, SealedReader, seal_parts
from storage.store import open_store
from training.checkpoint_commit import (
    MARKER,
    Commit,
    Found,
    find_in_store,
    find_on_disk,
    merge_found,
    parse_commit,
    remove_stored,
    store_folder,
)
from training.errors import CheckpointError


class CheckpointFiles:
    """The checkpoints of one run. A name is that of a checkpoint's directory."""

    def __init__(
        self, directory: Path, sealed: SealedShards, run: str, *, use_store: bool = True
    ) -> None:
        self.directory = directory
        self._sealed = sealed
        self._run = run
        self._store = open_store(sealed.region) if use_store else None

    @property
    def has_store(self) -> bool:
        return self._store is not None

    def find(self) -> list[Found]:
        """The committed ones in both places, oldest first."""
        return merge_found(self.find_on_disk(), self.find_in_store())

    def find_on_disk(self) -> list[Found]:
        """The committed ones on this disk, oldest first."""
        return find_on_disk(self.directory)

    def find_in_store(self) -> list[Found]:
        """The committed ones in the store, oldest first; none when it is not used."""
        return find_in_store(self._store, self._run) if self._store else []

    def write(self, name: str, file: str, pieces: Sequence[memoryview]) -> int:
        """Seal one file onto the disk and have it there; its sealed bytes. Raises OSError."""
        target = self.directory / name
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        num_bytes = sum(len(piece) for piece in pieces)
        parts = seal_parts(
            self._sealed.key,
            _reader_of(pieces),
            num_bytes,
            self._associated_data(name, file),
            Buffers(PART_BYTES),
        )
        descriptor = os.open(target / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        written = 0
        try:
            for part in parts:
                left = part
                while left:
                    count = os.write(descriptor, left)
                    written += count
                    left = left[count:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return written

    def commit(self, name: str, commit: Commit, mine: Iterable[str]) -> None:
        """Make a checkpoint of what was written, now or never. `mine` are this rank's files: those
        of others may be on other machines' disks.

        Raises OSError, CheckpointError when another world of this run took files away meanwhile.
        """
        target = self.directory / name
        there = {path.name: path.stat().st_size for path in target.iterdir()}
        _require_whole({file: commit.files[file] for file in mine}, there, str(target))
        pending = target / f"{MARKER}.tmp"
        content = commit.sign(self._sealed.key).model_dump_json(indent=1)
        with pending.open("w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        pending.rename(target / MARKER)
        sync_directory(target)
        sync_directory(self.directory)

    def upload(self, name: str, file: str) -> None:
        """Put a file of the disk in the store as it is, and say so in the access log.

        Raises StoreUnavailable, StorageError, OSError.
        """
        assert self._store is not None
        path = self.directory / name / file
        self._store.put(self._object(name, file), _parts_of(path))
        _record(self._sealed, "put", self._object(name, file), path.stat().st_size)

    def upload_marker(self, name: str) -> None:
        """Make a checkpoint of what was uploaded. Raises as `upload`, and CheckpointError."""
        assert self._store is not None
        folder = self._object(name)
        there = {info.name.rpartition("/")[2]: info.num_bytes for info in self._store.list(folder)}
        path = self.directory / name / MARKER
        _require_whole(parse_commit(path.read_bytes(), path).files, there, folder)
        self.upload(name, MARKER)

    def remove_unfinished(self) -> None:
        """What killed saves left in both places. Raises StoreUnavailable."""
        for path in self.directory.glob("step-*"):
            if not (path / MARKER).exists():
                shutil.rmtree(path)
        if self._store is not None:
            names = [info.name for info in self._store.list(store_folder(self._run))]
            whole = {name.removesuffix(f"/{MARKER}") for name in names if name.endswith(MARKER)}
            for name in names:
                if name.rpartition("/")[0] not in whole:
                    self._store.delete(name)

    def remove(self, name: str) -> None:
        """From the disk, the marker first."""
        (self.directory / name / MARKER).unlink(missing_ok=True)
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def remove_stored(self, name: str) -> None:
        """From the store, the marker first. Raises StoreUnavailable."""
        assert self._store is not None
        remove_stored(self._store, f"{store_folder(self._run)}/{name}")

    def check(self, found: Found) -> None:
        """Raise CheckpointError unless the marker is what this data key's holder wrote."""
        if not found.commit.is_signed(self._sealed.key):
            raise CheckpointError(
                f"{self.directory / found.name / MARKER} does not authenticate: it was "
                "changed, or is of another dataset version or region. Delete that directory (and "
                "its copy in the store) and run `convoy stage train`, which goes on from the one "
                "before it"
            )

    @contextlib.contextmanager
    def open(self, name: str, file: str) -> Iterator[SealedReader]:
        """A file, from the disk or else from the store. Raises ObjectMissing, SealBroken."""
        path = self.directory / name / file
        associated = self._associated_data(name, file)
        with contextlib.ExitStack() as stack:
            if path.exists() or self._store is None:
                descriptor = os.open(path, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                size = os.fstat(descriptor).st_size
                yield SealedReader(
                    self._sealed.key,
                    associated,
                    lambda start, end: _pread(descriptor, start, end),
                    size,
                )
            else:
                store, object_name = self._store, self._object(name, file)
                sizes = {info.name: info.num_bytes for info in store.list(self._object(name))}
                if object_name not in sizes:
                    raise ObjectMissing(f"{object_name} is neither on this disk nor in the store")
                size = sizes[object_name]
                yield SealedReader(
                    self._sealed.key,
                    associated,
                    lambda start, end: store.get(object_name, start, end),
                    size,
                )
                _record(self._sealed, "get", object_name, size)

    def read(self, name: str, file: str) -> bytes:
        """The whole of a file."""
        with self.open(name, file) as reader:
            return reader.read(0, reader.num_bytes)

    def _object(self, name: str, file: str = "") -> str:
        return "/".join(filter(None, (store_folder(self._run), name, file)))

    def _associated_data(self, name: str, file: str) -> bytes:
        # The same in both places: what is in the store is what is on the disk.
        region = self._sealed.region
        return associated_data(
            dataset=self._sealed.manifest.dataset,
            version=self._sealed.manifest.digest,
            region=region.name,
            jurisdiction=region.jurisdiction,
            name=self._object(name, file),
        )


def _require_whole(wanted: Mapping[str, int], there: Mapping[str, int], where: str) -> None:
    gone = sorted(file for file, size in wanted.items() if there.get(file) != size)
    if gone:
        raise CheckpointError(
            f"{where} has lost {', '.join(gone)} while it was written: another training of the "
            "same run is at work there"
        )


def _record(sealed: SealedShards, action: Action, name: str, num_bytes: int) -> None:
    record_access(sealed.log, sealed.region, action, name, num_bytes, artifact="checkpoint")


def _reader_of(pieces: Sequence[memoryview]) -> Callable[[memoryview], None]:
    """Gives the bytes of the pieces, one after another, as `seal_parts` asks for them."""
    number, offset = 0, 0

    def fill(into: memoryview) -> None:
        nonlocal number, offset
        done = 0
        while done < len(into):
            piece = pieces[number]
            count = min(len(piece) - offset, len(into) - done)
            into[done : done + count] = piece[offset : offset + count]
            done, offset = done + count, offset + count
            if offset == len(piece):
                number, offset = number + 1, 0

    return fill


def _parts_of(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(PART_BYTES):
            yield part


def _pread(descriptor: int, start: int, end: int) -> bytes:
    data = os.pread(descriptor, end - start, start)
    if len(data) < end - start:
        raise SealBroken(f"a file of a checkpoint ends at {start + len(data)} and not at {end}")
    return data
