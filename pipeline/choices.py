"""What `convoy init` makes of the fields of a raw input file."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from data.sources import SourceError
from data.values import comma_number
from pipeline.inspection import MAX_CATEGORIES, FieldSummary, SourceSummary

Task = Literal["classifier", "regressor", "language_model"]

_MAX_NUMBER_CLASSES = 20
UNUSED = {
    "serial": "only counts the records",
    "nested": "holds lists or mappings",
    "date": "is a date",
    "other": "is neither text, number nor date",
    "empty": "is empty in every record",
    "identifier": "is an identifier, another in every record",
}
"""Kinds of fields that are no target, and why."""


def choose_task(summary: SourceSummary, jurisdiction_field: str | None, target: str | None) -> Task:
    """A number with many values is a quantity; everything else is a class."""
    if target is None:
        return "language_model"
    if target == jurisdiction_field:
        raise SourceError(f"--target: '{target}' is already the jurisdiction; name another field")
    found = summary.find(target, "--target")
    if found.kind not in ("number", "category", "text"):
        raise SourceError(f"--target: '{target}' {UNUSED[found.kind]}; name another field")
    if found.num_odd:
        raise SourceError(
            f"--target: '{target}' looks like a {found.likeness}, but {tell_odd(found)}: correct "
            "or fill it in, or leave those records out of the file"
        )
    few = MAX_CATEGORIES if found.kind != "number" else _MAX_NUMBER_CLASSES
    if found.num_distinct is not None and found.num_distinct <= few:
        if found.num_distinct == 1:
            raise SourceError(f"--target: '{target}' has one value alone: nothing to learn")
        return "classifier"
    if found.kind == "number":
        return "regressor"
    raise SourceError(
        f"--target: '{target}' has more than {MAX_CATEGORIES} different texts, hardly classes: "
        "name another field, or none to model the text"
    )


def choose_fields(
    summary: SourceSummary, jurisdiction_field: str | None, target: str | None
) -> dict[str, tuple[str, ...]]:
    """The fields that the model reads, by the way it reads them."""
    usable = [field for field in summary.fields if field.name not in (jurisdiction_field, target)]

    def of(*kinds: str) -> tuple[str, ...]:
        return tuple(field.name for field in usable if field.kind in kinds)

    if target is None:
        texts = of("text") or of("category") or of("identifier")
        if not texts:
            raise SourceError(
                f"{summary.path} has no field of text to model: name the field to predict by "
                f"--target; it has {summary.list_names()}"
            )
        return {"numbers": (), "dates": (), "categories": (), "texts": texts}
    chosen = {
        "numbers": of("number"),
        "dates": of("date"),
        "categories": of("category"),
        "texts": of("text"),
    }
    if not any(chosen.values()):
        chosen["texts"] = of("identifier")
    if not any(chosen.values()):
        raise SourceError(f"{summary.path}: no other field to tell '{target}' from")
    return chosen


def choose_reading(
    summary: SourceSummary, task: Task, fields: Mapping[str, Sequence[str]], target: str | None
) -> dict[str, Any]:
    """Which fields are not read as all others of their kind, and what of data.values reads them."""
    used = {*fields["numbers"], *fields["dates"]}
    chosen = [found for found in summary.fields if found.name in used]
    commas = [found.name for found in chosen if found.convert is comma_number]
    unclean = [found.name for found in chosen if found.num_odd]
    is_comma = target is not None and summary.find(target, "--target").convert is comma_number
    imported = {
        "Convert": True,
        "OneOf": task == "classifier",
        "comma_number": bool(commas) or (task == "regressor" and is_comma),
        "days": bool(fields["dates"]),
        "number": task != "language_model",
        "or_missing": bool(unclean),
        "read_fields": task != "language_model",
        "text": True,
    }
    return {
        "commas": tuple(commas),
        "unclean": tuple(unclean),
        "read_target": "comma_number" if is_comma else "number",
        "imported": [name for name, is_used in imported.items() if is_used],
    }


def choose_group(summary: SourceSummary, fields: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """All fields but those that tell equal records apart: so which records are held out does not
    change with the features, and copies of a record stand together."""
    used = {name for names in fields.values() for name in names}
    return tuple(
        found.name
        for found in summary.fields
        if found.name in used or found.kind not in ("serial", "identifier", "empty")
    )


def tell_odd(field: FieldSummary) -> str:
    more = f", nor do {field.num_odd - 1} more records" if field.num_odd > 1 else ""
    return f"{field.first_odd} holds none{more}"
