"""What is looked at before anything is spent. Every error names field, file and remedy."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from data.errors import ManifestError, ResidencyError
from data.manifest import Manifest, read_manifest
from data.residency import Artifact, Exclusion
from data.sealed_shards import record_access
from data.shard import Shard
from pipeline import workspace
from pipeline.borders import log_refusals
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.machine import check_capacity
from pipeline.versioning import check_repository
from storage.access_log import AccessLog
from storage.claims import ClaimCheck, check_claims
from storage.errors import ClaimRefuted
from storage.keyring import check_keyring
from storage.region import Region
from storage.store import check_store, open_store
from training.plans import check_plans
from training.tracking import check_tracking, is_on_this_machine
from training.workload import Workload, check_params, load_workload

_MAX_LISTED = 250
"""More names than there are countries are not jurisdictions, but the values of a wrong field."""


def check_before_run(config: Config, root: Path) -> None:
    """Repository, workload, MLflow, stores and keys, before a flow runs its first stage."""
    check_repository(root, require_clean=config.registration.require_clean_git)
    workload = open_workload(config, root)
    check_ingest(config, workload)
    check_plans(workload, config.train)
    check_network(config)
    log_refusals(config, lambda: config.tracking_region)
    log_refusals(config, lambda: check_witness(config))
    check_tracking(config.tracking_uri)
    check_capacity(config.train.nodes)
    log = AccessLog(root / workspace.ACCESS_LOG, policy_digest=config.residency.digest)
    check_regions(config, log)


def open_workload(config: Config, root: Path) -> Workload:
    """The user's module, with what params.yaml says of it checked. Raises ConfigError and
    WorkloadError."""
    _check_code(config)
    workload = load_workload(config.workload.module, root)
    check_params(workload, "model", config.train.model, "train.model")
    return workload


def check_ingest(config: Config, workload: Workload) -> None:
    """Raise ConfigError or WorkloadError unless the raw input can be asked for."""
    ingest, field = config.ingest, "params.yaml: ingest"
    module = config.workload.module
    if workload.has_ingest:
        if ingest.source is not None:
            raise ConfigError(f"{field}.source: {module} has its own ingest(): remove one of them")
        check_params(workload, "ingest", ingest.params, "ingest.params", num_before=1)
        return
    if ingest.params:
        raise ConfigError(f"{field}.params: {module} has no ingest() that takes them: remove them")
    if ingest.source is None:
        raise ConfigError(
            f"{field}.source: {module} has no ingest(), so name the file or folder to take"
        )
    if not ingest.source.exists():
        raise ConfigError(f"{field}.source: there is no {ingest.source}: correct the path")
    source = ingest.source.resolve()
    target = (workspace.DATASETS / config.dataset).resolve()
    if source == target or source in target.parents or target in source.parents:
        raise ConfigError(
            f"{field}.source: {ingest.source} and the copy's place, "
            f"{workspace.DATASETS / config.dataset}, lie in each other; `dvc repro` empties that "
            "place first: keep your file elsewhere"
        )


def _check_code(config: Config) -> None:
    """`code` is what DVC watches, what a run's fingerprint is of, and what the model carries."""
    field, code, module = "params.yaml: workload.code", config.workload.code, config.workload.module
    if not code.exists():
        raise ConfigError(
            f"{field}: there is no {code}; it names the file or folder that holds {module}"
        )
    top, *inner = module.split(".")
    expected = top if code.is_dir() else f"{top}.py"
    if code.resolve().name != expected or (inner and not code.is_dir()):
        raise ConfigError(
            f"{field}: {code} is not all of the code of {module}: name "
            f"{top if inner else f'{top}.py'}, or the folder {top}"
        )


def read_current_manifest(config: Config) -> Manifest:
    """The manifest of the present dataset. Raises ManifestError."""
    manifest = read_manifest(workspace.MANIFEST)
    if manifest.dataset != config.dataset:
        raise ManifestError(
            f"{workspace.MANIFEST} is of dataset {manifest.dataset}, and params.yaml: dataset is "
            f"{config.dataset}: run `convoy stage ingest` and `convoy stage shard`"
        )
    return manifest


def check_regions(config: Config, log: AccessLog) -> dict[str, tuple[ClaimCheck, ...]]:
    """Compare each region with what it claims, then write and read its store, and wrap and unwrap
    with its key. Gives what was looked at, by region; a refusal is logged.

    A store that holds wrapped keys wants the wrapping key they were wrapped by: a new one in its
    place would hide that the old one is lost.
    """
    checks = check_claimed(config, config.upload_regions, log)
    for region in config.upload_regions:
        check_store(region)
        has_keys = any(True for _ in open_store(region).list("keys"))
        check_keyring(region, may_create=not has_keys)
    return checks


def check_claimed(
    config: Config, regions: Iterable[Region], log: AccessLog
) -> dict[str, tuple[ClaimCheck, ...]]:
    """Compare bucket and key of each region with what it claims; a refusal is logged."""
    checks: dict[str, tuple[ClaimCheck, ...]] = {}
    for region in regions:
        try:
            checks[region.name] = check_claims(region)
        except ClaimRefuted as error:
            record_access(log, region, "refuse", f"{config.dataset}/all", refused=str(error))
            raise
    return checks


def check_jurisdictions(unknown: Mapping[str, int]) -> None:
    """Raise ResidencyError for jurisdictions that no rule names, with their records counted."""
    if unknown:
        names = sorted(unknown)
        listed = ", ".join(f"{name} ({unknown[name]} records)" for name in names[:_MAX_LISTED])
        if len(names) > _MAX_LISTED:
            listed += f" and {len(names) - _MAX_LISTED} more"
        raise ResidencyError(
            f"no rule in params.yaml: residency.rules names these jurisdictions: {listed}. "
            "Nothing was written. Add rules that say where their shards may be, or leave those "
            "records out in the workload's records()"
        )


def check_network(config: Config) -> None:
    """Raise ConfigError when nodes are to be in namespaces, from which the site's store and key
    cannot be reached."""
    if not config.train.network.namespaces:
        return
    site = config.site
    for name, url in (("store", site.store), ("wrapping_key", site.wrapping_key)):
        if not url.startswith("file:"):
            raise ConfigError(
                f"params.yaml: train.network.namespaces: nodes in namespaces of their own reach "
                f"one another and nothing else, and regions.{site.name}.{name} is {url}: take a "
                "region whose store and key are file: URLs, or leave namespaces out"
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
    not be there, and ConfigError when less than a batch or nothing to evaluate on is left.
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
    if not config.residency.split_readable(manifest.of("holdout"), site)[0]:
        raise ConfigError(
            f"params.yaml: shard.holdout is {config.shard.holdout} and region {site} may read no "
            "held-out record to evaluate on: raise it, ingest more records, "
            "or allow more in residency.rules"
        )
    check_artifacts(config, readable, ("checkpoint", "model", "metrics"), config.site)
    check_artifacts(config, readable, ("metrics", "model"), config.tracking_region)
    return readable, list(excluded)


def check_artifacts(
    config: Config, shards: Iterable[Shard], artifacts: tuple[Artifact, ...], region: Region
) -> None:
    """Raise ResidencyError unless what is made of these shards may be in the region."""
    for jurisdiction in sorted({shard.jurisdiction for shard in shards}):
        for artifact in artifacts:
            config.residency.require(jurisdiction, artifact, region.name)


def check_witness(config: Config) -> None:
    """Raise ResidencyError unless the log of the present dataset may be where its checkpoints go.

    Before there is a dataset the log says nothing of anybody's records.
    """
    region = config.witness_region
    try:
        jurisdictions = sorted(read_current_manifest(config).count_records()) if region else []
    except ManifestError:  # the stage that needs it says so
        jurisdictions = []
    for jurisdiction in jurisdictions:
        assert region
        config.residency.require(jurisdiction, "log", region.name)


def check_artifact_root(config: Config, uri: str) -> None:
    """Raise ResidencyError when MLflow keeps artifacts in a place that no region is named for."""
    if config.registration.region is None and not is_on_this_machine(uri):
        raise ResidencyError(
            f"params.yaml: register.region: the MLflow experiment "
            f"'{config.registration.experiment}' keeps its artifacts in {uri}, which is not on "
            "this machine: name the region that this is in, or another register.experiment"
        )
