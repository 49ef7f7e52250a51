"""`convoy init`: a workspace that works, written from a raw input file."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pipeline.choices import Task, choose_fields, choose_group, choose_reading, choose_task
from pipeline.inspection import inspect_source
from pipeline.scaffold import assign, check_name, read_origin, start_versioning, write_files
from pipeline.sentences import tell, tell_territory
from pipeline.survey import Survey, survey_source
from pipeline.territories import (
    Place,
    check_whose,
    choose_names,
    choose_site,
    doubt,
    lay_out,
    name_given,
)
from pipeline.workspace import replace_directory

_EPOCHS = 6
_TEXT_EPOCHS = 20


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
    group: str | None = None,
) -> Created:
    """Write `parent/name` whole, or nothing.

    group: a union of countries whose members are one jurisdiction.
    Raises WorkspaceError for a name that cannot be one or is taken, SourceError for what the file
    does not have, and VersioningError without git.
    """
    root = check_name(parent, name)
    summary = inspect_source(source)
    check_whose(summary, jurisdiction_field, jurisdiction)
    task = choose_task(summary, jurisdiction_field, target)
    fields = choose_fields(summary, jurisdiction_field, target)
    survey = survey_source(
        summary,
        jurisdiction_field=jurisdiction_field,
        jurisdiction=None if jurisdiction is None else name_given("--jurisdiction", jurisdiction),
        name_jurisdiction=choose_names(group, jurisdiction_field),
        classes=target if task == "classifier" else None,
        amounts=target if task == "regressor" else None,
        texts=fields["texts"] if task == "language_model" else (),
    )
    places = lay_out(survey, jurisdiction_field)
    site = choose_site(places, train_in, group)
    shape = _shape(task, survey, site, target)
    spoken_for = (jurisdiction_field, target)
    found = tell(summary, fields, places, site, shape, spoken_for) + doubt(places, group)
    context = {
        "name": name,
        "model_name": name.replace("_", "-"),
        "file_name": source.name,
        "source": _point_to(source, parent),
        "found": found,
        "places": places,
        "site": site,
        "other": next((place for place in places if place is not site), None),
        "territory": tell_territory(jurisdiction_field, group),
        "union": group,
        "origin": read_origin(),
        "jurisdiction_field": jurisdiction_field,
        "whose": assign("JURISDICTION_FIELD", jurisdiction_field)
        if jurisdiction_field
        else assign("JURISDICTION", site.jurisdiction),
        "target": target,
        "group": choose_group(summary, fields),
        **choose_reading(summary, task, fields, target),
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


def _shape(task: Task, survey: Survey, site: Place, target: str | None) -> dict[str, Any]:
    """What the templates of one workload need: its constants and the sizes of its training."""
    if task == "language_model":
        return _shape_language_model(survey, site)
    size = _choose_size(site.num_records, _EPOCHS, max_batch=64, min_steps=120, max_steps=1000)
    common = {"size": size, "lr": 0.003, "counted": "", "prefix": False, "alternatives": ""}
    if task == "classifier":
        classes = tuple(sorted(survey.classes))
        return common | {
            "what": f"a model that tells which of {len(classes)} classes '{target}' is",
            "classes": classes,
            "model": {},
            "primary": "accuracy",
            "alternatives": "or auc, or loss; " if len(classes) == 2 else "or loss; ",
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
        "alternatives": "or mse; ",
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
        "counted": (
            f"; its texts there are cut into {num_samples} samples of at most {length} bytes, "
            "which `convoy run` calls records"
        ),
        "size": _choose_size(num_samples, _TEXT_EPOCHS, max_batch=32, min_steps=100, max_steps=400),
        "lr": 0.004,
        "prefix": True,
        "alternatives": "",
        "model": {},
        "primary": "bits_per_byte",
        "goal": "minimize",
        "told": "",
    }


def _choose_size(
    num_samples: int, epochs: int, *, max_batch: int, min_steps: int, max_steps: int
) -> _Size:
    """So many epochs within the bounds; a batch is at most half of the training samples."""
    holdout = 0.25 if num_samples < 200 else 0.2 if num_samples < 1000 else 0.1
    holdout = min(holdout, round(5000 / num_samples, 4)) if num_samples > 50_000 else holdout
    num_train = int(num_samples * (1 - holdout))
    batch = min(max_batch, 2 ** int(math.log2(num_train / 2)))
    steps = min(max_steps, max(min_steps, epochs * num_train // batch))
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
