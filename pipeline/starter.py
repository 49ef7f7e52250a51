"""`convoy init`: a workspace that works, written from a raw input file."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from data.sources import SourceError
from pipeline.inspection import (
    MAX_CATEGORIES,
    SourceSummary,
    Survey,
    inspect_source,
    survey_source,
)
from pipeline.scaffold import assign, check_name, start_versioning, write_files
from pipeline.territories import Place, check_whose, choose_site, lay_out, name_given
from pipeline.workspace import replace_directory

Task = Literal["classifier", "regressor", "language_model"]

_MAX_NUMBER_CLASSES = 20
_UNUSED = {
    "serial": "only counts the records",
    "bytes": "is neither text nor number",
    "empty": "is empty in every record",
    "identifier": "is an identifier, another in every record",
}


@dataclass(frozen=True)
class Created:
    """A new workspace."""

    path: Path
    found: tuple[str, ...]
    """What was found in the file and chosen for it, as sentences."""
    next_steps: tuple[str, ...]
    """What to do now: shell commands, and what is left to do by hand."""


@dataclass(frozen=True)
class _Size:
    """Sized so that training takes about a minute on two cores, and evaluation less."""

    holdout: float
    records_per_shard: int
    global_batch: int
    steps: int


def create_workspace(
    parent: Path,
    name: str,
    source: Path,
    *,
    jurisdiction_field: str | None,
    jurisdiction: str | None,
    target: str | None,
    train_in: str | None,
) -> Created:
    """Write `parent/name` whole, or nothing.

    Raises WorkspaceError for a name that cannot be one or is taken, SourceError for what the file
    does not have, and VersioningError without git.
    """
    root = check_name(parent, name)
    summary = inspect_source(source)
    check_whose(summary, jurisdiction_field, jurisdiction)
    task = _choose_task(summary, jurisdiction_field, target)
    fields = _choose_fields(summary, jurisdiction_field, target)
    survey = survey_source(
        summary,
        jurisdiction_field=jurisdiction_field,
        jurisdiction=None if jurisdiction is None else name_given("--jurisdiction", jurisdiction),
        classes=target if task == "classifier" else None,
        amounts=target if task == "regressor" else None,
        texts=fields["texts"] if task == "language_model" else (),
    )
    places = lay_out(survey, jurisdiction_field)
    site = choose_site(places, train_in)
    shape = _shape(task, survey, site, target)
    found = _tell(summary, fields, places, site, shape["what"])
    context = {
        "name": name,
        "model_name": name.replace("_", "-"),
        "file_name": source.name,
        "source": _point_to(source, parent),
        "found": found,
        "places": places,
        "site": site,
        "other": next((place for place in places if place is not site), None),
        "territory": _tell_territory(jurisdiction_field),
        "jurisdiction_field": jurisdiction_field,
        "whose": assign("JURISDICTION_FIELD", jurisdiction_field)
        if jurisdiction_field
        else assign("JURISDICTION", site.jurisdiction),
        "target": target,
        **fields,
        **shape,
    }
    with replace_directory(root) as fresh:
        write_files(fresh, name, f"{task}.py.j2", context)
        is_committed = start_versioning(fresh, f"Start {name}")
    commit = (
        "git config user.name NAME && git config user.email ADDRESS (git knows no user yet)",
        f"git commit -m 'Start {name}'",
    )
    steps = (f"cd {root}", *(() if is_committed else commit), "convoy run", "convoy report")
    return Created(path=root, found=tuple(found), next_steps=steps)


def _choose_task(
    summary: SourceSummary, jurisdiction_field: str | None, target: str | None
) -> Task:
    """A number with many values is a quantity; everything else is a class."""
    if target is None:
        return "language_model"
    if target == jurisdiction_field:
        raise SourceError(f"--target: '{target}' is already the jurisdiction; name another field")
    found = summary.find(target, "--target")
    if found.kind not in ("number", "category", "text"):
        raise SourceError(f"--target: '{target}' {_UNUSED[found.kind]}; name another field")
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


def _choose_fields(
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
        return {"numbers": (), "categories": (), "texts": texts}
    chosen = {"numbers": of("number"), "categories": of("category"), "texts": of("text")}
    if not any(chosen.values()):
        chosen["texts"] = of("identifier")
    if not any(chosen.values()):
        raise SourceError(f"{summary.path}: no other field to tell '{target}' from")
    return chosen


def _shape(task: Task, survey: Survey, site: Place, target: str | None) -> dict[str, Any]:
    """What the templates of one workload need: its constants and the sizes of its training."""
    if task == "language_model":
        return _shape_language_model(survey, site)
    size = _choose_size(site.num_records, max_batch=64, min_steps=120, max_steps=1000)
    common = {"size": size, "lr": 0.003}
    if task == "classifier":
        classes = tuple(sorted(survey.classes))
        return common | {
            "what": f"a model that tells which of {len(classes)} classes '{target}' is",
            "classes": classes,
            "model": {},
            "primary": "accuracy",
            "goal": "maximize",
            "told": f" and the classes of '{target}'",
        }
    amounts = survey.amounts[site.jurisdiction]
    center = median(amounts)
    spread = fmean(abs(amount - center) for amount in amounts) or 1.0
    return common | {
        "what": f"a model that predicts the number '{target}'",
        "model": {"center": _round(center), "spread": _round(spread)},
        "primary": "mae",
        "goal": "minimize",
        "told": f", `params.yaml` about where '{target}' lies in {site.jurisdiction}",
    }


def _shape_language_model(survey: Survey, site: Place) -> dict[str, Any]:
    lengths = sorted(survey.text_bytes[site.jurisdiction])
    usual = lengths[int(0.9 * (len(lengths) - 1))]
    length = min(128, max(16, 16 * math.ceil(usual / 16)))
    num_samples = sum(max(1, math.ceil(num_bytes / length)) for num_bytes in lengths)
    return {
        "what": "a language model of its text",
        "length": length,
        "size": _choose_size(num_samples, max_batch=32, min_steps=100, max_steps=400),
        "lr": 0.004,
        "model": {},
        "primary": "bits_per_byte",
        "goal": "minimize",
        "told": "",
    }


def _choose_size(num_samples: int, *, max_batch: int, min_steps: int, max_steps: int) -> _Size:
    """About 20 epochs within the bounds; a batch is at most half of the training samples."""
    holdout = 0.25 if num_samples < 200 else 0.2 if num_samples < 1000 else 0.1
    holdout = min(holdout, round(5000 / num_samples, 4)) if num_samples > 50_000 else holdout
    num_train = int(num_samples * (1 - holdout))
    batch = min(max_batch, 2 ** int(math.log2(num_train / 2)))
    steps = min(max_steps, max(min_steps, 20 * num_train // batch))
    return _Size(
        holdout=holdout,
        records_per_shard=min(8192, max(256, 2 ** int(math.log2(num_samples / 8)))),
        global_batch=max(4, batch),
        steps=steps,
    )


def _round(value: float) -> float:
    """To two digits: enough for a start."""
    return float(f"{value:.2g}")


def _point_to(source: Path, parent: Path) -> str:
    """Relative when the file lies below the workspace's parent, so that both may move together."""
    file = os.path.abspath(source)
    below = os.path.relpath(file, parent)
    return file if below.startswith("..") else os.path.join("..", below)


def _tell_territory(jurisdiction_field: str | None) -> str:
    if jurisdiction_field is None:
        return "All records are of one jurisdiction, as `convoy init --jurisdiction` said."
    return (
        f"The field `{jurisdiction_field}` says whose law binds a record. In its values all but "
        "letters, digits, `-` and `_` becomes `-`: `United Kingdom` is `United-Kingdom`."
    )


def _tell(
    summary: SourceSummary,
    fields: Mapping[str, Sequence[str]],
    places: Sequence[Place],
    site: Place,
    what: str,
) -> list[str]:
    listed = ", ".join(f"{place.jurisdiction} {place.num_records}" for place in places)
    used = [name for names in fields.values() for name in names]
    sentences = [
        f"{summary.path.name} ({summary.format}): {summary.num_records} records",
        f"records by jurisdiction: {listed}",
        f"training in region {site.region} reads the {site.num_records} records of "
        f"{site.jurisdiction}",
        f"{what}, from {', '.join(used)}",
    ]
    elsewhere = summary.num_records - site.num_records
    if elsewhere:
        sentences[2] += f"; the other {elsewhere} stay in their own regions and are not used"
    for field in summary.fields:
        if field.kind in _UNUSED and field.name not in used:
            sentences.append(f"field '{field.name}' {_UNUSED[field.kind]}, and is not used")
    folded: dict[str, str] = {}
    for place in places:
        twin = folded.setdefault(place.jurisdiction.lower(), place.jurisdiction)
        if twin != place.jurisdiction:
            sentences.append(f"{twin} and {place.jurisdiction} are two jurisdictions: are they?")
    return sentences
