"""Upload, region by region: the shards that may live there, and the receipt for them."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import rfc8785
from pydantic import BaseModel, ValidationError

from data.errors import DataError, ManifestError, ShardBroken
from data.manifest import Manifest
from data.residency import Exclusion, Residency
from data.sealed_shards import SealedShards, open_region, record_access
from data.shard import Shard
from storage.access_log import AccessLog
from storage.region import Region
from storage.sealed import sealed_size

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
        record_access(log, region, "refuse", whose, refused=exclusion.reason)
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


def _changed(shard: Shard, path: Path) -> ShardBroken:
    return ShardBroken(
        f"{path} is not what the manifest says: it was changed, cut or swapped; "
        "run `convoy stage shard`"
    )
