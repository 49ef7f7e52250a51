"""Records as plain shards, and sealed in a store of files, for the benchmarks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.manifest import Manifest
from data.record import Record
from data.sealed_shards import SealedShards, open_region
from data.sharding import ShardConfig, write_shards
from data.upload import upload_region
from storage.access_log import AccessLog
from storage.region import Region
from tests.residency import EU_AT_HOME
from training.config import TrainConfig


def write_plain(
    fields: Iterable[dict[str, Any]], directory: Path, *, records_per_shard: int
) -> Manifest:
    """Shards of the records, not compressed, below `directory`."""
    directory.mkdir(parents=True)
    config = ShardConfig(
        records_per_shard=records_per_shard,
        bytes_per_shard=1 << 30,
        holdout=0.0,
        compression="none",
    )
    records = (Record(row, "EU") for row in fields)
    return Manifest(dataset="bench", shards=write_shards(records, directory, config))


def place(manifest: Manifest, shards: Path, directory: Path) -> SealedShards:
    """The shards sealed into a store of files, opened for reading as training does."""
    region = Region(
        name="eu",
        jurisdiction="EU",
        store=f"file:{directory}/store",
        wrapping_key=f"file:{directory}/eu.key",
    )
    log = AccessLog(directory / "access.log")
    upload_region(manifest, shards, region, EU_AT_HOME, log)
    return open_region(manifest, region, log, verify=TrainConfig.model_fields["verify"].default)
