"""Whose law binds the records of a raw input file, and a region for each jurisdiction."""

import difflib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from data.sources import SourceError
from data.sources import jurisdiction as name_jurisdiction
from data.unions import is_member, list_names, list_unions, member_of
from data.values import Convert
from pipeline.inspection import MAX_JURISDICTIONS, SourceSummary, is_territory_code
from pipeline.survey import Survey

_MAX_PLAIN_JURISDICTIONS = 40
_MIN_RECORDS = 20
_FEW_RECORDS = 3
_MANY_TIMES = 50
"""So many times more records of a jurisdiction with nearly the same name show a slip."""
_LIKENESS = 0.8
_NOT_KNOWN = frozenset(
    (
        *("n-a", "nan", "none", "null", "nil", "unknown", "unspecified", "undefined", "missing"),
        *("not-given", "not-known", "not-available", "other", "others", "misc", "tbd", "xx", "zz"),
    )
)


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
        if summary.format == "text":
            raise SourceError(
                f"{summary.path}: whose law binds the records? Lines of text do not say: name one "
                "jurisdiction for all by --jurisdiction, for example EU"
            )
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


def choose_names(union: str | None, jurisdiction_field: str | None) -> Convert:
    """What makes a jurisdiction of a value: members of the union, if one is given, are the union.

    Raises SourceError.
    """
    if union is None:
        return name_jurisdiction
    if union not in list_unions():
        raise SourceError(f"--group: '{union}' is not known; known are {', '.join(list_unions())}")
    if jurisdiction_field is None:
        raise SourceError("--group makes one jurisdiction of several: give --jurisdiction-field")
    return member_of(union)


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


def choose_site(places: Sequence[Place], train_in: str | None, union: str | None) -> Place:
    """Where training runs: as asked for, or where most records are. Raises SourceError."""
    site = places[0]
    if train_in is not None:
        name = name_given("--train-in", train_in)
        name = union if union and is_member(union, name) else name
        wanted = [place for place in places if place.jurisdiction == name]
        if not wanted:
            known = ", ".join(f"{place.jurisdiction} ({place.num_records})" for place in places)
            raise SourceError(
                f"--train-in: no record is of jurisdiction '{train_in}'; there are {known}"
            )
        site = wanted[0]
    if site.num_records < _MIN_RECORDS:
        others = any(place.num_records >= _MIN_RECORDS for place in places)
        remedy = ", or name another jurisdiction by --train-in" if others else ""
        raise SourceError(
            f"{site.jurisdiction} has {site.num_records} records, too few to train on some and "
            f"evaluate on others: {_MIN_RECORDS} at least. Bring more{remedy}"
        )
    return site


def doubt(places: Sequence[Place], union: str | None) -> list[str]:
    """What looks amiss with the jurisdictions or could be better, as sentences."""
    sentences = [_doubt_one(place, places) for place in places]
    folded: dict[str, str] = {}
    for place in places:
        twin = folded.setdefault(place.jurisdiction.lower(), place.jurisdiction)
        if twin != place.jurisdiction:
            sentences.append(f"{twin} and {place.jurisdiction} are two jurisdictions: are they?")
    for offered in list_unions() if union is None else ():
        members = [p.jurisdiction for p in places if is_member(offered, p.jurisdiction)]
        if len(members) > 1:
            sentences.append(
                f"{_list(members)} are members of the {offered}, and each is a jurisdiction of its "
                f"own: `convoy init --group {offered}` makes one of them, so that training reads "
                "all"
            )
    return [sentence for sentence in sentences if sentence]


def _doubt_one(place: Place, places: Sequence[Place]) -> str:
    name, count = place.jurisdiction, place.num_records
    said = f"jurisdiction {name} ({count} record{'s' if count > 1 else ''})"
    if name.lower() in _NOT_KNOWN:
        return (
            f"{said} looks as if none were known, and has a region of its own: fill in whose law "
            "binds the records, or leave them out of the file"
        )
    if name == "NA":
        return f"{said} is Namibia by its ISO code: if it stands for nothing given, fill it in"
    known = {
        other.jurisdiction: other.num_records
        for other in places
        if other is not place and other.num_records >= _MANY_TIMES * count
    }
    if count < _FEW_RECORDS:
        known |= {other: 0 for union in list_unions() for other in list_names(union)}
    close = difflib.get_close_matches(name, [k for k in known if k != name], 1, _LIKENESS)
    if close and len(name) > _FEW_RECORDS and name not in known:
        return f"{said} has a region of its own: should it be {close[0]}? Correct the file then"
    if count < _FEW_RECORDS:
        return f"{said} is rare, and has a region of its own: is it a slip?"
    return ""


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown
