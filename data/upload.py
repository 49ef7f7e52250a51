"""Upload, region by region: the shards that may live there, and the receipt for them."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Literal

import rfc8785
from pydantic import BaseModel, ValidationError

from data.errors import DataError, ManifestError, ShardBroken
from data.manifest import Manifest
from data.residency import Exclusion, Residency
from data.sealed_shards import SealedShards, open_region, record_access
from data.shard import Shard
from storage.access_log import AccessLog
from storage.buffers import Buffers
from storage.claims import ClaimCheck
from storage.region import Region
from storage.sealed import PART_BYTES, sealed_size
from storage.store import ObjectStore
from storage.unfinished import end_unfinished

_PARTS_IN_FLIGHT = 8
_PARTS_OF_A_PUT = 4
"""How many of one shard a store sends at once."""
_LOOKS_IN_FLIGHT = 16
_PROGRESS_SECONDS = 0.5
_MAX_LISTED = 5


class PlacedShard(BaseModel, frozen=True, extra="forbid"):
    """A shard in a region: its plaintext digest and its name in the store."""

    shard: str
    digest: str
    address: str
    num_bytes: int
    """Size of the sealed object."""


class UploadReceipt(BaseModel, frozen=True, extra="forbid"):
    """What lies in one region, and what may not."""

    format: Literal["convoy-receipt-v1"] = "convoy-receipt-v1"
    region: str
    dataset: str
    version: str
    """The manifest's digest."""
    placed: tuple[PlacedShard, ...]
    withheld: tuple[Exclusion, ...]
    checks: tuple[ClaimCheck, ...] = ()
    """What bucket and key were found to be, before the first byte."""

    def write(self, path: Path) -> None:
        path.write_bytes(rfc8785.dumps(self.model_dump()))


def read_receipt(path: Path, manifest: Manifest) -> UploadReceipt:
    """Read a region's receipt. Raises ManifestError when missing or of another dataset version."""
    remedy = "run `convoy stage upload`"
    try:
        receipt = UploadReceipt.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing: {remedy}") from None
    except ValidationError as error:
        raise ManifestError(f"{path}: {error.errors()[0]['msg']}; {remedy}") from None
    if receipt.version != manifest.digest:
        raise ManifestError(
            f"{path} is of version {receipt.version[:12]}, the manifest is "
            f"{manifest.digest[:12]}: {remedy}"
        )
    return receipt


def check_placed(receipt: UploadReceipt, store: ObjectStore) -> None:
    """Raise DataError unless the store has every object that the receipt names, of its size."""
    sizes = {info.name: info.num_bytes for info in store.list("objects")}
    gone = [placed.shard for placed in receipt.placed if placed.address not in sizes]
    other = [
        placed.shard
        for placed in receipt.placed
        if sizes.get(placed.address, placed.num_bytes) != placed.num_bytes
    ]
    if gone or other:
        listed = ", ".join((gone + other)[:_MAX_LISTED])
        raise DataError(
            f"region {receipt.region}: of the {len(receipt.placed)} shards in its receipt the "
            f"store has lost {len(gone)} and holds {len(other)} of another size: {listed}"
            f"{', ...' if len(gone + other) > _MAX_LISTED else ''}. Run `convoy stage upload`, "
            "which places them again"
        )


def upload_region(
    manifest: Manifest,
    directory: Path,
    region: Region,
    residency: Residency,
    log: AccessLog,
    on_shard: Callable[[Shard, bool], None] = lambda shard, sent: None,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
    checks: tuple[ClaimCheck, ...] = (),
) -> UploadReceipt:
    """Place in the region every shard of `directory` that may live there; what is there is kept.

    `on_shard(shard, sent)` is called for each, and `on_bytes`, while shards are on their way, with
    how many bytes of them were read since its last call; `checks` go into the receipt. A shard is
    sealed while it is sent, in memory that does not grow with its size, and is in the store when
    the whole of it is: so an upload that ended early, in whatever way, goes on where it was.
    Raises ShardBroken for a local file that is not what the manifest says, DataError for one that
    is neither here nor in the store.
    """
    allowed, withheld = _split_placeable(manifest.shards, region, residency)
    for exclusion in withheld:
        whose = f"{manifest.digest}/{exclusion.jurisdiction}"
        record_access(log, region, "refuse", whose, refused=exclusion.reason)
    placed: list[PlacedShard] = []
    if allowed:
        shards = open_region(manifest, region, log, writable=True)
        missing = _find_missing(allowed, shards)
        if missing and not shards.is_new:
            end_unfinished(region, {shards.address(shard) for shard in missing.values()})
        _check_local(missing.values(), directory, region)
        for shard in allowed:
            if shard.name not in missing:
                on_shard(shard, False)
        _send_all(missing.values(), directory, shards, on_shard, on_bytes)
        placed = [
            PlacedShard(
                shard=shard.name,
                digest=shard.digest,
                address=shards.address(shard),
                num_bytes=sealed_size(shard.num_bytes),
            )
            for shard in allowed
        ]
    return UploadReceipt(
        region=region.name,
        dataset=manifest.dataset,
        version=manifest.digest,
        placed=tuple(placed),
        withheld=withheld,
        checks=checks,
    )


def _split_placeable(
    shards: Iterable[Shard], region: Region, residency: Residency
) -> tuple[list[Shard], tuple[Exclusion, ...]]:
    placing = residency.model_copy(update={"on_restricted": "exclude"})
    allowed, withheld = placing.split_readable(shards, region.name)
    return list(allowed), withheld


def _find_missing(allowed: list[Shard], shards: SealedShards) -> dict[str, Shard]:
    """By name, those that the store does not hold whole."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_LOOKS_IN_FLIGHT) as pool:
        try:
            held = list(pool.map(shards.holds, allowed))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {shard.name: shard for shard, is_held in zip(allowed, held, strict=True) if not is_held}


def _check_local(missing: Iterable[Shard], directory: Path, region: Region) -> None:
    for shard in missing:
        path = directory / shard.name
        if not path.is_file():
            raise DataError(
                f"shard {shard.name} is neither in {directory} nor in the store of region "
                f"{region.name}: run `convoy stage shard`"
            )
        if path.stat().st_size != shard.num_bytes:
            raise _changed(shard, path)


def _send_all(
    missing: Iterable[Shard],
    directory: Path,
    shards: SealedShards,
    on_shard: Callable[[Shard, bool], None],
    on_bytes: Callable[[int], None],
) -> None:
    """Send some at a time. After an error no other is begun, and those on their way are ended."""
    from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

    waiting = deque(missing)
    largest = max((shard.num_bytes for shard in waiting), default=0)
    num_puts = _PARTS_IN_FLIGHT // min(_PARTS_OF_A_PUT, largest // PART_BYTES + 1)
    free = [Buffers(PART_BYTES) for _ in range(num_puts)]
    in_flight: dict[Future[None], tuple[_Sending, Buffers]] = {}
    told = finished = 0
    with ThreadPoolExecutor(num_puts) as pool:
        while waiting or in_flight:
            while waiting and free:
                sending, buffers = _Sending(waiting.popleft(), directory), free.pop()
                in_flight[pool.submit(sending.run, shards, buffers)] = (sending, buffers)
            done, _ = wait(in_flight, _PROGRESS_SECONDS, FIRST_COMPLETED)
            arrived: list[Shard] = []
            for future in done:
                sending, buffers = in_flight.pop(future)
                future.result()
                free.append(buffers)
                finished += sending.num_bytes
                arrived.append(sending.shard)
            read = finished + sum(sending.num_bytes for sending, _ in in_flight.values())
            on_bytes(read - told)
            told = read
            for shard in arrived:
                on_shard(shard, True)


class _Sending:
    """A shard on its way to a store. `num_bytes` of its file were read and sealed."""

    def __init__(self, shard: Shard, directory: Path) -> None:
        self.shard = shard
        self.num_bytes = 0
        self._path = directory / shard.name
        self._digest = hashlib.sha256()

    def run(self, shards: SealedShards, buffers: Buffers) -> None:
        try:
            file = self._path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from None
        with file:
            shards.put(self.shard, lambda into: self._fill(into, file), buffers)

    def _fill(self, into: memoryview, file: BinaryIO) -> None:
        """Give the next bytes; the last ones only if all of them are what the manifest says.

        A store has no object before it has the last bytes: so none of a changed file.
        """
        try:
            num_read = file.readinto(into)  # type: ignore[attr-defined]
        except OSError as error:
            raise self._unreadable(error) from None
        self._digest.update(into)
        self.num_bytes += len(into)
        is_whole = self.num_bytes < self.shard.num_bytes or (
            self._digest.hexdigest() == self.shard.digest and not file.read(1)
        )
        if num_read != len(into) or not is_whole:
            raise _changed(self.shard, self._path)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"{self._path} cannot be read ({error.strerror}): mend its disk, or run "
            "`convoy stage shard`"
        )


def _changed(shard: Shard, path: Path) -> ShardBroken:
    return ShardBroken(
        f"{path} is not what the manifest says: it was changed, cut or swapped; "
        "run `convoy stage shard`"
    )
