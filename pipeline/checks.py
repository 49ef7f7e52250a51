"""What is looked at before anything is spent. Every error names field, file and remedy."""

from collections.abc import Iterable
from pathlib import Path

from data.errors import ResidencyError
from data.manifest import Manifest
from data.residency import Artifact, Exclusion
from data.shard import Shard
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.versioning import check_repository
from storage.keyring import check_keyring
from storage.store import check_store
from training.workload import check_model_params, load_workload


def check_before_run(config: Config, root: Path) -> None:
    """Repository, workload, stores and keys, before a flow runs its first stage."""
    check_repository(root, require_clean=config.registration.require_clean_git)
    check_code(config)
    check_model_params(load_workload(config.workload.module, root), config.train.model)
    check_regions(config)


def check_code(config: Config) -> None:
    """Raise ConfigError unless workload.code is there."""
    if not config.workload.code.exists():
        raise ConfigError(
            f"params.yaml: workload.code: there is no {config.workload.code}; it names the file "
            f"or folder that holds {config.workload.module}"
        )


def check_regions(config: Config) -> None:
    """Write and read each region's store, and wrap and unwrap with each region's key."""
    for region in config.upload_regions:
        check_store(region)
        check_keyring(region)


def check_jurisdictions(config: Config, unknown: dict[str, int]) -> None:
    """Raise ResidencyError for jurisdictions that no rule names, with their records counted."""
    if unknown:
        listed = ", ".join(f"{name} ({count} records)" for name, count in sorted(unknown.items()))
        raise ResidencyError(
            f"no rule in params.yaml: residency.rules names these jurisdictions: {listed}. "
            "Nothing was written. Add rules that say where their shards may be, or leave those "
            "records out in the workload's records()"
        )


def check_placeable(config: Config, manifest: Manifest) -> None:
    """Raise ResidencyError when some jurisdiction's shards may be in no region at all."""
    homeless: list[str] = []
    for jurisdiction in manifest.count_records():
        decisions = [
            config.residency.decide(jurisdiction, "shard", region.name)
            for region in config.upload_regions
        ]
        if not any(decision.allowed for decision in decisions):
            homeless.append(f"{jurisdiction} ({decisions[0].reason})")
    if homeless:
        raise ResidencyError(
            f"no region may hold the shards of {', '.join(sorted(homeless))}. Nothing was "
            "uploaded. Add a region or a rule in params.yaml: regions, residency.rules"
        )


def check_site(config: Config, manifest: Manifest) -> tuple[tuple[Shard, ...], list[Exclusion]]:
    """The training shards that the site may read, and what is excluded.

    Raises ResidencyError under `on_restricted: fail`, for a checkpoint, model or metrics that may
    not be there, and ConfigError when less than a batch is left.
    """
    site = config.site.name
    readable, excluded = config.residency.split_readable(manifest.of("train"), site)
    num_records = sum(shard.num_records for shard in readable)
    if num_records < config.train.global_batch:
        raise ConfigError(
            f"params.yaml: train.global_batch is {config.train.global_batch} and region {site} "
            f"may read {num_records} training records"
            f"{' after exclusions' if excluded else ''}: lower it, ingest more records, "
            "or allow more in residency.rules"
        )
    check_artifacts(config, readable, ("checkpoint", "model", "metrics"))
    return readable, list(excluded)


def check_artifacts(
    config: Config, shards: Iterable[Shard], artifacts: tuple[Artifact, ...]
) -> None:
    """Raise ResidencyError unless what is made of these shards may be at the training site."""
    for jurisdiction in sorted({shard.jurisdiction for shard in shards}):
        for artifact in artifacts:
            config.residency.require(jurisdiction, artifact, config.site.name)
