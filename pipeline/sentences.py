"""What `convoy init` found and chose, in sentences: never a value of a record."""

from collections.abc import Mapping, Sequence
from typing import Any

from data.values import comma_number
from pipeline.choices import UNUSED, tell_odd
from pipeline.inspection import FieldSummary, SourceSummary
from pipeline.territories import Place


def tell_territory(jurisdiction_field: str | None, union: str | None) -> str:
    if jurisdiction_field is None:
        return "All records are of one jurisdiction, as `convoy init --jurisdiction` said."
    said = (
        f"The field `{jurisdiction_field}` says whose law binds a record. In its values all but "
        "letters, digits, `-` and `_` becomes `-`: `United Kingdom` is `United-Kingdom`."
    )
    if union is None:
        return said
    return f"{said} The members of the {union} are one jurisdiction, `{union}`."


def tell(
    summary: SourceSummary,
    fields: Mapping[str, Sequence[str]],
    places: Sequence[Place],
    site: Place,
    shape: Mapping[str, Any],
    spoken_for: Sequence[str | None],
) -> list[str]:
    """spoken_for: the target and the field that says whose law binds a record."""
    listed = ", ".join(f"{place.jurisdiction} {place.num_records}" for place in places)
    used = [name for names in fields.values() for name in names]
    sentences = [
        f"{summary.path.name} ({summary.format}): {summary.num_records} records",
        f"records by jurisdiction: {listed}",
        f"training in region {site.region} reads the {site.num_records} records of "
        f"{site.jurisdiction}",
        f"{shape['what']}, from {', '.join(used)}{shape['counted']}",
        *(f"{kind}: {', '.join(names)}" for kind, names in fields.items() if names),
    ]
    elsewhere = summary.num_records - site.num_records
    if elsewhere:
        sentences[2] += f"; the other {elsewhere} stay in their own regions and are not used"
    for field in summary.fields:
        if field.name in used:
            sentences += _tell_reading(field)
        elif field.name not in spoken_for:
            why = UNUSED.get(field.kind, f"is a {field.kind}, and texts alone are modelled")
            sentences.append(f"left out: '{field.name}' {why}")
    return sentences


def _tell_reading(field: FieldSummary) -> list[str]:
    """What is not plain in how a field is read."""
    sentences = []
    if field.convert is comma_number:
        sentences.append(f"in '{field.name}' a comma is read as the decimal point")
    if field.num_odd:
        counted = "what is none counts as missing"
        if field.kind != field.likeness:
            counted = (
                f"it is read as {field.kind}: correct the file and init again, or move it to "
                "NUMBERS in the module and read it by or_missing(number) in TYPES"
            )
        sentences.append(
            f"'{field.name}' looks like a {field.likeness}, but {tell_odd(field)}; {counted}"
        )
    return sentences
