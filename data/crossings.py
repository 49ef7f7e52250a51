"""Records that left their jurisdiction, counted by calendar year: some laws have limits for them.

China's rules of March 2024 on cross-border data, for one, ask how many people's data left since
1 January. Records are counted, not people: where a person has several, the count is too high,
never too low. The file is canonical JSON and is replaced whole. What is about to cross is written
before the first byte, so that a killed upload is counted, and once for a dataset version.
"""

import contextlib
import os
from collections.abc import Container, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Literal

import rfc8785
from pydantic import BaseModel, NonNegativeInt, ValidationError

from data.errors import ResidencyError
from data.manifest import Manifest
from data.residency import Artifact, Residency
from storage.region import Region


class Crossing(BaseModel, frozen=True, extra="forbid"):
    """Records of a dataset version that went to a region outside their jurisdictions."""

    day: date
    """When they first did (UTC)."""
    dataset: str
    version: str
    region: str
    num_records: dict[str, dict[str, NonNegativeInt]]
    """By rule and jurisdiction."""
    shredded: bool = False
    """Whether the region's key of that version was destroyed since. To upload it again counts."""


class Crossings(BaseModel, frozen=True, extra="forbid"):
    """All that ever crossed from this workspace."""

    format: Literal["convoy-crossings-v1"] = "convoy-crossings-v1"
    crossings: tuple[Crossing, ...] = ()

    def count(self, year: int, rule: str | None = None) -> dict[str, int]:
        """Records by jurisdiction, by one rule or by all. A dataset version counts once, in
        however many regions it is.
        """
        versions: dict[str, dict[str, int]] = {}
        for crossing in self.crossings:
            if crossing.day.year == year:
                seen = versions.setdefault(crossing.version, {})
                for name, records in crossing.num_records.items():
                    if rule in (None, name):
                        for jurisdiction, num_records in records.items():
                            seen[jurisdiction] = max(num_records, seen.get(jurisdiction, 0))
        total: dict[str, int] = {}
        for seen in versions.values():
            for jurisdiction, num_records in seen.items():
                total[jurisdiction] = total.get(jurisdiction, 0) + num_records
        return dict(sorted(total.items()))

    def add(self, crossings: Iterable[Crossing]) -> "Crossings":
        """These and others."""
        return self.model_copy(update={"crossings": (*self.crossings, *crossings)})

    def mark_shredded(self, version: str, region: str) -> "Crossings":
        """The same after the version's key in that region was destroyed."""
        marked = [
            crossing.model_copy(update={"shredded": True})
            if (crossing.version, crossing.region) == (version, region)
            else crossing
            for crossing in self.crossings
        ]
        return self.model_copy(update={"crossings": tuple(marked)})

    def write(self, path: Path) -> None:
        """Replace the file, whole and synced, readable by this user alone."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(rfc8785.dumps(self.model_dump(mode="json")))
            file.flush()
            os.fsync(descriptor)
        fresh.replace(path)


def read_crossings(path: Path) -> Crossings:
    """Read the file; nothing has crossed if there is none. Raises ResidencyError."""
    try:
        return Crossings.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Crossings()
    except ValidationError:
        raise ResidencyError(
            f"{path} is not what Convoy wrote: it holds the yearly counts of records that left "
            "their jurisdiction. Restore it from a copy"
        ) from None


def find_crossings(
    manifest: Manifest,
    regions: Iterable[Region],
    residency: Residency,
    today: date,
    artifact: Artifact = "shard",
    jurisdictions: Container[str] | None = None,
) -> tuple[Crossing, ...]:
    """What leaves its jurisdiction when this version, or what of it is of some jurisdictions alone,
    is placed wherever the policy lets it be.
    """
    found = []
    for region in regions:
        by_rule: dict[str, dict[str, int]] = {}
        for jurisdiction, num_records in sorted(manifest.count_records().items()):
            if jurisdictions is not None and jurisdiction not in jurisdictions:
                continue
            decision = residency.decide(jurisdiction, artifact, region.name, today)
            if decision.allowed and decision.rule and jurisdiction != region.jurisdiction:
                by_rule.setdefault(decision.rule, {})[jurisdiction] = num_records
        if by_rule:
            found.append(
                Crossing(
                    day=today,
                    dataset=manifest.dataset,
                    version=manifest.digest,
                    region=region.name,
                    num_records=by_rule,
                )
            )
    return tuple(found)


def find_new(crossings: Iterable[Crossing], before: Crossings) -> tuple[Crossing, ...]:
    """Those that were not counted yet, each with just the jurisdictions that were not."""
    new = []
    for crossing in crossings:
        counted = {
            jurisdiction
            for other in before.crossings
            if (other.version, other.region) == (crossing.version, crossing.region)
            and not other.shredded
            for records in other.num_records.values()
            for jurisdiction in records
        }
        left = {
            rule: {j: n for j, n in records.items() if j not in counted}
            for rule, records in crossing.num_records.items()
        }
        left = {rule: records for rule, records in left.items() if records}
        if left:
            new.append(crossing.model_copy(update={"num_records": left}))
    return tuple(new)


def check_limits(crossings: Crossings, residency: Residency, year: int) -> Mapping[str, str]:
    """Why each rule whose yearly limit is exceeded no longer holds, by rule."""
    reasons: dict[str, str] = {}
    for rule in residency.rules:
        if rule.yearly_limit is not None:
            over = {
                jurisdiction: count
                for jurisdiction, count in crossings.count(year, rule.name).items()
                if count > rule.yearly_limit
            }
            if over:
                listed = ", ".join(f"{count} of {name}" for name, count in over.items())
                reasons[rule.name] = (
                    f"rule '{rule.name}' lets {rule.yearly_limit} records of a jurisdiction leave "
                    f"it in a year, and with these {listed} would have left in {year}"
                )
    return reasons
