"""Whose law binds the records of a raw input file, and a region for each jurisdiction."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from data.sources import SourceError
from data.sources import jurisdiction as name_jurisdiction
from pipeline.inspection import MAX_JURISDICTIONS, SourceSummary, Survey, is_territory_code

_MAX_PLAIN_JURISDICTIONS = 40
_MIN_RECORDS = 20


@dataclass(frozen=True)
class Place:
    """A jurisdiction and the region that holds it."""

    region: str
    jurisdiction: str
    num_records: int


def check_whose(
    summary: SourceSummary, jurisdiction_field: str | None, jurisdiction: str | None
) -> None:
    """Raise SourceError unless exactly one is given, and the field is there and may be one."""
    if jurisdiction_field is not None and jurisdiction is not None:
        raise SourceError("give --jurisdiction-field or --jurisdiction, not both")
    if jurisdiction_field is not None:
        found = summary.find(jurisdiction_field, "--jurisdiction-field")
        if found.num_distinct is None:
            raise _hardly(found.name, f"more than {MAX_JURISDICTIONS}")
    elif jurisdiction is None:
        likely = ", ".join(summary.likely_jurisdictions) or "none"
        raise SourceError(
            f"{summary.path}: whose law binds the records? Name the field that says so by "
            f"--jurisdiction-field (likely: {likely}; fields: {summary.list_names()}), "
            "or one jurisdiction for all by --jurisdiction, for example EU"
        )


def _hardly(name: str, how_many: int | str) -> SourceError:
    return SourceError(
        f"--jurisdiction-field: field '{name}' has {how_many} distinct values; it is hardly a "
        "jurisdiction. Name another field, or one jurisdiction for all by --jurisdiction"
    )


def name_given(option: str, jurisdiction: str) -> str:
    """A jurisdiction given as an option, as records name it. Raises SourceError."""
    try:
        return name_jurisdiction(jurisdiction)
    except ValueError:
        raise SourceError(f"{option}: '{jurisdiction}' cannot name one; for example EU") from None


def lay_out(survey: Survey, jurisdiction_field: str | None) -> tuple[Place, ...]:
    """A region for each jurisdiction, most records first."""
    names = list(survey.num_records)
    if len(names) > _MAX_PLAIN_JURISDICTIONS and not all(map(is_territory_code, names)):
        raise _hardly(jurisdiction_field or "", len(names))
    places: list[Place] = []
    for name, num_records in survey.num_records.items():
        region = _name_region(name, {place.region for place in places})
        places.append(Place(region, name, num_records))
    return tuple(places)


def _name_region(jurisdiction: str, taken: set[str]) -> str:
    """`cote-d-ivoire` of `Côte-d-Ivoire`; numbered where a script has no Latin letters."""
    plain = unicodedata.normalize("NFKD", jurisdiction).encode("ascii", "ignore").decode()
    stem = re.sub(r"[^a-z0-9]+", "-", plain.lower())[:50].strip("-") or "region"
    name, index = stem, 1
    while name in taken:
        index += 1
        name = f"{stem}-{index}"
    return name


def choose_site(places: Sequence[Place], train_in: str | None) -> Place:
    """Where training runs: as asked for, or where most records are. Raises SourceError."""
    site = places[0]
    if train_in is not None:
        name = name_given("--train-in", train_in)
        wanted = [place for place in places if place.jurisdiction == name]
        if not wanted:
            known = ", ".join(f"{place.jurisdiction} ({place.num_records})" for place in places)
            raise SourceError(
                f"--train-in: no record is of jurisdiction '{train_in}'; there are {known}"
            )
        site = wanted[0]
    if site.num_records < _MIN_RECORDS:
        raise SourceError(
            f"{site.jurisdiction} has {site.num_records} records, too few to train on some and "
            f"evaluate on others: {_MIN_RECORDS} at least. Bring more, or name another "
            "jurisdiction by --train-in"
        )
    return site
