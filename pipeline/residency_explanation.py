"""Why an object is where it is, and where it may not be."""

import re
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

from pydantic import BaseModel

from data.manifest import Manifest
from data.residency import Artifact
from data.shard import Shard
from data.upload import UploadReceipt
from pipeline import workspace
from pipeline.config import Config
from pipeline.errors import WorkspaceError

_HEX = re.compile(r"[0-9a-f]{4,64}")
_MODEL_URI = re.compile(r"models:/(?P<name>[^/@]+)(?:/\d+|@\w+)?")


class Verdict(BaseModel, frozen=True, extra="forbid"):
    """May the object be in this region, as far as one jurisdiction is asked?"""

    jurisdiction: str
    region: str
    lies_there: bool
    allowed: bool
    rule: str | None
    mechanism: str | None
    evidence: str | None
    expires: date | None
    reason: str


class Explanation(BaseModel, frozen=True, extra="forbid"):
    """An object, whose it is, where it lies and why, and where it may not be."""

    object: str
    artifact: Artifact
    version: str
    """Of the dataset that it is of, or was made of."""
    num_records: dict[str, int]
    """By jurisdiction."""
    lies_in: dict[str, str]
    """By region, what it is called there."""
    verdicts: tuple[Verdict, ...]

    @property
    def forbidden_in(self) -> tuple[str, ...]:
        """Regions where some jurisdiction's records keep it from being."""
        return tuple(dict.fromkeys(v.region for v in self.verdicts if not v.allowed))


def explain_object(
    config: Config,
    name: str,
    manifest: Manifest,
    receipts: Mapping[str, UploadReceipt],
    readable: Iterable[Shard],
    today: date,
) -> Explanation:
    """Find the object by its file name, its digest's first digits, its name in a store, or its
    path, and explain it. Raises WorkspaceError for a name that is of nothing, or of several.
    """
    found = _find_shards(name, manifest, receipts)
    if len(found) > 1:
        listed = ", ".join(sorted(found)[:5])
        raise WorkspaceError(f"'{name}' is the name of {len(found)} shards ({listed}): say more")
    if found:
        [shard] = found.values()
        lies_in = {
            region: placed.address
            for region, receipt in receipts.items()
            for placed in receipt.placed
            if placed.shard == shard.name
        }
        records = {shard.jurisdiction: shard.num_records}
        return _explain(config, shard.name, "shard", manifest, records, lies_in, today)
    artifact, lies_in = _find_artifact(config, name)
    records = dict(manifest.count_records())
    if artifact not in ("raw", "shard"):
        records = _count(readable)
    return _explain(config, name, artifact, manifest, records, lies_in, today)


def _find_shards(
    name: str, manifest: Manifest, receipts: Mapping[str, UploadReceipt]
) -> dict[str, Shard]:
    shards = {shard.name: shard for shard in manifest.shards}
    file_name = Path(name).name
    if file_name in shards:
        return {file_name: shards[file_name]}
    digits = name.removeprefix("sha256:").rpartition("objects/")[2]
    if not _HEX.fullmatch(digits):
        return {}
    addressed = {
        placed.shard
        for receipt in receipts.values()
        for placed in receipt.placed
        if placed.address.rpartition("/")[2].startswith(digits)
    }
    return {
        shard.name: shard
        for shard in manifest.shards
        if shard.digest.startswith(digits) or shard.name in addressed
    }


def _find_artifact(config: Config, name: str) -> tuple[Artifact, dict[str, str]]:
    """What class of thing a path or a model's URI names, and where it lies."""
    site = config.site.name
    model = _MODEL_URI.fullmatch(name)
    if model and model["name"] == config.registration.model_name:
        return "model", {config.tracking_region.name: name}
    path = Path(name)
    if model is None and path.exists():
        inside = path.resolve().relative_to(Path.cwd()) if _is_inside(path) else path
        places: tuple[tuple[Path, Artifact], ...] = (
            (workspace.DATASETS / config.dataset, "raw"),
            (workspace.SHARDS.parent, "shard"),
            (workspace.RUNS, "checkpoint"),
            (workspace.TRAINED, "checkpoint"),
            (workspace.EVALUATED, "metrics"),
            (workspace.REGISTERED, "model"),
            (workspace.STATE / "mlartifacts", "model"),
        )
        for folder, artifact in places:
            if inside == folder or folder in inside.parents:
                return artifact, {site: str(inside)}
    raise WorkspaceError(
        f"'{name}' is not known here: give a shard's file name, the first digits of its digest, "
        "its name in a store, the path of an artifact, or models:/"
        f"{config.registration.model_name}/VERSION. Of another dataset version it is known where "
        "that version's commit is checked out"
    )


def _is_inside(path: Path) -> bool:
    return Path.cwd() in path.resolve().parents


def _count(shards: Iterable[Shard]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for shard in shards:
        counts[shard.jurisdiction] = counts.get(shard.jurisdiction, 0) + shard.num_records
    return counts


def _explain(
    config: Config,
    name: str,
    artifact: Artifact,
    manifest: Manifest,
    num_records: Mapping[str, int],
    lies_in: Mapping[str, str],
    today: date,
) -> Explanation:
    verdicts = []
    for region in config.regions:
        for jurisdiction in sorted(num_records):
            decision = config.residency.decide(jurisdiction, artifact, region, today)
            rule = config.residency.find_rule(decision.rule) if decision.rule else None
            verdicts.append(
                Verdict(
                    jurisdiction=jurisdiction,
                    region=region,
                    lies_there=region in lies_in,
                    allowed=decision.allowed,
                    rule=decision.rule,
                    mechanism=rule.mechanism if rule else None,
                    evidence=rule.evidence if rule else None,
                    expires=rule.expires if rule else None,
                    reason=decision.reason,
                )
            )
    return Explanation(
        object=name,
        artifact=artifact,
        version=manifest.digest,
        num_records=dict(sorted(num_records.items())),
        lies_in=dict(lies_in),
        verdicts=tuple(verdicts),
    )
