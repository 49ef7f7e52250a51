"""Shards to places and back: seal and put, get and open. The only code where data meets storage."""

import getpass
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import rfc8785
from pydantic import BaseModel, ValidationError

from data.errors import DataError, ManifestError, ShardBroken
from data.manifest import Manifest
from data.residency import Exclusion, Residency
from data.shard import OpenShard, Shard, open_shard
from storage.access_log import AccessEntry, AccessLog, Action
from storage.envelope import (
    associated_data,
    content_address,
    envelope_name,
    obtain_data_key,
    unwrap_data_key,
)
from storage.errors import ObjectMissing, SealBroken
from storage.keyring import open_keyring
from storage.region import Region
from storage.sealed import SealedReader, open_sealed, seal, sealed_size
from storage.store import ObjectStore, open_store

RUN_ID_VARIABLE = "CONVOY_RUN_ID"
"""Environment variable that names the run in the access log."""

_PUTS_IN_FLIGHT = 4


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


@dataclass(frozen=True)
class SealedShards:
    """One region's sealed shards of one dataset version, and the key that opens them."""

    manifest: Manifest
    region: Region
    store: ObjectStore = field(repr=False)
    key: bytes = field(repr=False)
    log: AccessLog = field(repr=False)

    def address(self, shard: Shard) -> str:
        """The object's name in the store."""
        return f"objects/{content_address(self.key, shard.digest)}"

    def holds(self, shard: Shard) -> bool:
        """Whether the store holds the whole object: its size is right, and its header and last
        segment authenticate."""
        address = self.address(shard)
        sealed_bytes = sealed_size(shard.num_bytes)

        def read(start: int, end: int) -> bytes:
            # At the end one byte more is asked for, and must not be there.
            return self.store.get(address, start, end + 1 if end == sealed_bytes else end)

        try:
            SealedReader(self.key, self._associated_data(shard), read, sealed_bytes)
        except (ObjectMissing, SealBroken):
            return False
        return True

    def put(self, shard: Shard, content: bytes) -> None:
        """Seal a plaintext shard and place it."""
        address = self.address(shard)
        sealed = seal(self.key, content, self._associated_data(shard))
        self.store.put(address, sealed)
        _record(self.log, self.region, "put", address, len(sealed))

    def open(self, shard: Shard) -> OpenShard:
        """Get a shard, authenticate every byte of it and give its records, in memory alone.

        Raises ShardBroken, which names the shard, the region and the reason.
        """
        address = self.address(shard)
        where = f"region {self.region.name}"
        try:
            sealed = self.store.get(address)
            content = open_sealed(self.key, sealed, self._associated_data(shard))
        except ObjectMissing:
            raise ShardBroken(
                f"shard {shard.name} is not in {where} ({address}): run `convoy stage upload`"
            ) from None
        except SealBroken as error:
            raise ShardBroken(
                f"shard {shard.name} in {where} ({address}): {error}. "
                "Delete the object and run `convoy stage upload`, which places it again."
            ) from None
        _record(self.log, self.region, "get", address, len(sealed))
        return open_shard(shard, content, where)

    def _associated_data(self, shard: Shard) -> bytes:
        return associated_data(
            dataset=self.manifest.dataset,
            version=self.manifest.digest,
            region=self.region.name,
            jurisdiction=shard.jurisdiction,
            name=self.address(shard),
        )


def open_region(
    manifest: Manifest, region: Region, log: AccessLog, *, writable: bool = False
) -> SealedShards:
    """Unwrap the region's data key for this dataset version; `writable` makes it when missing."""
    store = open_store(region)
    obtain = obtain_data_key if writable else unwrap_data_key
    key = obtain(region, store, open_keyring(region), manifest.dataset, manifest.digest)
    _record(log, region, "unwrap", envelope_name(manifest.digest))
    return SealedShards(manifest, region, store, key, log)


def upload_region(
    manifest: Manifest,
    directory: Path,
    region: Region,
    residency: Residency,
    log: AccessLog,
    on_shard: Callable[[Shard, bool], None] = lambda shard, sent: None,
) -> UploadReceipt:
    """Place in the region every shard of `directory` that may live there; what is there is kept.

    `on_shard(shard, sent)` is called for each. Raises ShardBroken for a local file that is not
    what the manifest says, DataError for one that is neither here nor in the store.
    """
    allowed, withheld = _split_placeable(manifest.shards, region, residency)
    for exclusion in withheld:
        whose = f"{manifest.digest}/{exclusion.jurisdiction}"
        _record(log, region, "refuse", whose, refused=exclusion.reason)
    placed: list[PlacedShard] = []
    if allowed:
        shards = open_region(manifest, region, log, writable=True)
        missing = [shard for shard in allowed if not shards.holds(shard)]
        _check_local(missing, directory, region)
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_PUTS_IN_FLIGHT) as pool:
            sent = pool.map(lambda shard: _send(shard, directory, shards), missing)
            for shard in sent:
                on_shard(shard, True)
        for shard in allowed:
            if shard not in missing:
                on_shard(shard, False)
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
    )


def _split_placeable(
    shards: Iterable[Shard], region: Region, residency: Residency
) -> tuple[list[Shard], tuple[Exclusion, ...]]:
    placing = residency.model_copy(update={"on_restricted": "exclude"})
    allowed, withheld = placing.split_readable(shards, region.name)
    return list(allowed), withheld


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


def _send(shard: Shard, directory: Path, shards: SealedShards) -> Shard:
    path = directory / shard.name
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.digest:
        raise _changed(shard, path)
    shards.put(shard, content)
    return shard


def _record(
    log: AccessLog,
    region: Region,
    action: Action,
    name: str,
    num_bytes: int = 0,
    refused: str | None = None,
) -> None:
    log.append(
        AccessEntry(
            actor=getpass.getuser(),
            region=region.name,
            action=action,
            object=name,
            artifact="shard",
            num_bytes=num_bytes,
            decision="refused" if refused else "allowed",
            reason=refused or "residency",
            run_id=os.environ.get(RUN_ID_VARIABLE, ""),
        )
    )


def _changed(shard: Shard, path: Path) -> ShardBroken:
    return ShardBroken(
        f"{path} is not what the manifest says: it was changed, cut or swapped; "
        "run `convoy stage shard`"
    )
