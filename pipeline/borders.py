"""What the access log and the yearly counts say of what crosses a border, or was refused to."""

from collections.abc import Callable, Container, Iterable
from datetime import UTC, datetime
from typing import TypeVar

from data.crossings import (
    Crossing,
    Crossings,
    check_limits,
    find_crossings,
    find_new,
    read_crossings,
)
from data.errors import ResidencyError
from data.manifest import Manifest
from data.residency import Artifact, Exclusion
from data.shard import Shard
from pipeline import workspace
from pipeline.config import Config
from storage.access_log import AccessEntry, AccessLog
from storage.region import Region

Answer = TypeVar("Answer")


def count_crossings(
    config: Config,
    manifest: Manifest,
    regions: Iterable[Region],
    log: AccessLog,
    artifact: Artifact = "shard",
    jurisdictions: Container[str] | None = None,
) -> None:
    """Count what will leave its jurisdiction, each dataset version once, before its first byte.

    Raises ResidencyError, and counts nothing, when a yearly limit would be exceeded; the log has
    an entry for each crossing, or for the refusal.
    """
    today = datetime.now(UTC).date()
    before = read_crossings(workspace.CROSSINGS)
    crossings = find_crossings(manifest, regions, config.residency, today, artifact, jurisdictions)
    new = find_new(crossings, before)
    log_refusals(config, lambda: _require_limits(config, before.add(new), today.year))
    if new:
        with workspace.explain_disk(workspace.CROSSINGS):
            before.add(new).write(workspace.CROSSINGS)
    for crossing in new:
        _log_crossing(config, crossing, artifact, log)


def _require_limits(config: Config, crossings: Crossings, year: int) -> None:
    for reason in check_limits(crossings, config.residency, year).values():
        raise ResidencyError(
            f"residency: {reason}. Nothing was moved. Leave records out, or raise yearly_limit in "
            "params.yaml: residency.rules if the law allows it"
        )


def _log_crossing(config: Config, crossing: Crossing, artifact: Artifact, log: AccessLog) -> None:
    for rule, records in crossing.num_records.items():
        for jurisdiction, num_records in records.items():
            home = config.home_of(jurisdiction)
            log.append(
                AccessEntry(
                    region=crossing.region,
                    action="cross",
                    object=f"{crossing.version}/{jurisdiction}",
                    artifact=artifact,
                    from_region=home.name if home else "",
                    to_region=crossing.region,
                    policy_digest=config.residency.digest,
                    decision="allowed",
                    reason=f"rule '{rule}', {num_records} records",
                )
            )


def log_made(
    config: Config, artifact: Artifact, name: str, shards: Iterable[Shard], log: AccessLog
) -> None:
    """Say in the log that what is made of these shards is where some of them are not at home: in
    one entry, for it is one thing.
    """
    region = config.site if artifact == "checkpoint" else config.tracking_region
    jurisdictions = sorted({shard.jurisdiction for shard in shards} - {region.jurisdiction})
    if jurisdictions:
        log.append(
            AccessEntry(
                region=region.name,
                action="cross",
                object=name,
                artifact=artifact,
                to_region=region.name,
                policy_digest=config.residency.digest,
                decision="allowed",
                reason=f"made of records of {', '.join(jurisdictions)}",
            )
        )


def log_exclusions(
    config: Config, manifest: Manifest, excluded: Iterable[Exclusion], log: AccessLog
) -> None:
    """Say in the log what the training region may not read."""
    for exclusion in excluded:
        log.append(
            AccessEntry(
                region=config.site.name,
                action="refuse",
                object=f"{manifest.digest}/{exclusion.jurisdiction}",
                artifact="shard",
                policy_digest=config.residency.digest,
                decision="refused",
                reason=f"{exclusion.num_shards} shards to train on: {exclusion.reason}",
            )
        )


def log_refusals(config: Config, ask: Callable[[], Answer]) -> Answer:
    """What `ask` answers; when it raises ResidencyError, the access log says so first."""
    try:
        return ask()
    except ResidencyError as error:
        AccessLog(workspace.ACCESS_LOG).append(
            AccessEntry(
                region=config.site.name,
                action="refuse",
                object=config.dataset,
                artifact="policy",
                policy_digest=config.residency.digest,
                decision="refused",
                reason=str(error),
            )
        )
        raise
