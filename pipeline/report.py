"""`convoy report`: one offline HTML page on the last run of a workspace.

The page is a pure function of the workspace and of the day, since rules expire. It loads nothing,
and tells the browser so by a content security policy. It holds no content of a record.
"""

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pipeline import workspace
from pipeline.config import Config
from pipeline.errors import WorkspaceError
from pipeline.findings import Findings, list_regions, read_findings
from pipeline.lineage import digest_config
from pipeline.report_plots import draw_plots
from pipeline.speed import PHASES, compare_ranks, find_slowest
from pipeline.stages import STAGES
from pipeline.versioning import read_revision
from pipeline.whereabouts import list_contents, place_rows, use_rules
from training.evaluate import Metrics, Score

_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class ExcludedRow:
    """Records of one jurisdiction that were not used, for one reason."""

    jurisdiction: str
    num_training: int
    num_held_out: int
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The model beside the best baseline, by one metric."""

    value: float
    baseline: str
    baseline_value: float
    gain: float
    """Share of the baseline's value by which the model is better; negative when it is worse."""


@dataclass(frozen=True)
class Lineage:
    """One thing that the model was made of."""

    name: str
    value: str | None
    """None while there is none."""
    note: str = ""


def write_report(config: Config, root: Path, output: Path | None = None) -> Path:
    """Write the page on the last run in the workspace `root` and give its path.

    A stage that has not run is said to be missing, with the command to run. Raises WorkspaceError
    when the page cannot be written.
    """
    path = output or root / workspace.REPORT
    page = render_report(config, root, datetime.now(UTC))
    pending = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pending.write_text(page, encoding="utf-8")
            pending.replace(path)
        finally:
            pending.unlink(missing_ok=True)
    except OSError as error:
        raise WorkspaceError(
            f"the report {path} could not be written ({error.strerror}): make room there, or "
            "name another file"
        ) from error
    return path


def render_report(config: Config, root: Path, now: datetime) -> str:
    """The page as HTML. `now` is shown, and its day decides which rules have expired."""
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    findings = read_findings(config, root)
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            config=config,
            now=now,
            stages=list(STAGES),
            style=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
            script=Markup(script),
            script_digest=digest,
            **vars(findings),
            **_describe_places(config, root, findings, now),
            excluded=merge_exclusions(findings),
            plots=draw_plots(findings),
            **_describe_speed(findings),
            **_describe_metrics(findings.metrics),
            lineage=list_lineage(config, root, findings),
        )
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=lambda number: f"{number:,}",
        metric=format_metric,
        size=format_size,
        commands=mark_commands,
    )
    return environment


def _describe_places(
    config: Config, root: Path, findings: Findings, now: datetime
) -> dict[str, Any]:
    regions = list_regions(config, root)
    manifest, receipts, today = findings.manifest, findings.receipts, now.date()
    shards = manifest.shards if manifest else ()
    rows = place_rows(shards, receipts, config.residency, regions, today)
    return {
        "regions": regions,
        "rows": rows,
        "conflicts": [r.jurisdiction for r in rows if any(c.state == "conflict" for c in r.cells)],
        "rules": use_rules(rows, config.residency, today),
        "contents": list_contents(shards, receipts, regions),
        "num_plaintext": sum((root / workspace.SHARDS / shard.name).exists() for shard in shards),
    }


def _describe_speed(findings: Findings) -> dict[str, Any]:
    ranks = compare_ranks(findings.ranks)
    slowest = find_slowest(ranks)
    return {"speeds": ranks, "slowest": slowest, "phases": list(PHASES.values())}


def _describe_metrics(metrics: Metrics | None) -> dict[str, Any]:
    if metrics is None:
        return {"comparison": None, "comparisons": {}, "names": (), "baselines": ()}
    most_records_first = sorted(
        metrics.by_jurisdiction.items(), key=lambda item: (-metrics.num_records[item[0]], item[0])
    )
    return {
        "comparison": compare(metrics.overall, metrics.primary, metrics.goal),
        "comparisons": {
            jurisdiction: compare(score, metrics.primary, metrics.goal)
            for jurisdiction, score in most_records_first
        },
        # The metric that decides stands first.
        "names": sorted(metrics.overall.model, key=lambda name: (name != metrics.primary, name)),
        "baselines": sorted(metrics.overall.baselines),
    }


def compare(score: Score, metric: str, goal: Literal["minimize", "maximize"]) -> Comparison | None:
    """The model beside its best baseline; None when there is none, or nothing to divide by."""
    values = {name: each[metric] for name, each in score.baselines.items() if metric in each}
    if metric not in score.model or not values:
        return None
    sign = -1 if goal == "minimize" else 1
    best = max(sorted(values), key=lambda name: sign * values[name])
    if not values[best]:
        return None
    value = score.model[metric]
    gain = sign * (value - values[best]) / abs(values[best])
    return Comparison(value=value, baseline=best, baseline_value=values[best], gain=gain)


def merge_exclusions(findings: Findings) -> tuple[ExcludedRow, ...]:
    """What training and evaluation did not use, by jurisdiction and reason."""
    sources = (findings.training, findings.metrics)
    counts: dict[tuple[str, str], list[int]] = {}
    for column, source in enumerate(sources):
        for exclusion in source.excluded if source else ():
            key = (exclusion.jurisdiction, exclusion.reason)
            counts.setdefault(key, [0, 0])[column] += exclusion.num_records
    return tuple(
        ExcludedRow(jurisdiction, num_training, num_held_out, reason)
        for (jurisdiction, reason), (num_training, num_held_out) in sorted(counts.items())
    )


def list_lineage(config: Config, root: Path, findings: Findings) -> tuple[Lineage, ...]:
    """What the model was made of. Revisions are the workspace's own, at the time of the report."""
    revision = read_revision(root)
    manifest, training, model = findings.manifest, findings.training, findings.model_version
    now = "of the workspace now; the model version carries the one it was registered from"
    return (
        Lineage("Dataset", config.dataset),
        Lineage(
            "Dataset version", manifest.digest if manifest else None, "SHA-256 of the manifest"
        ),
        Lineage("Configuration", digest_config(config), "SHA-256 of params.yaml as it is read now"),
        Lineage("Residency policy", config.residency.digest, "SHA-256 of its rules now"),
        Lineage("Git revision", revision.git, now),
        Lineage("DVC revision", revision.dvc, f"SHA-256 of dvc.lock {now}"),
        Lineage(
            "Training fingerprint",
            training.fingerprint if training else None,
            "SHA-256 of all that the training's result depends on",
        ),
        Lineage(
            "MLflow run",
            training.mlflow_run_id if training else None,
            f"experiment {config.registration.experiment}",
        ),
        Lineage("Model version", model.uri if model else None),
    )


def format_metric(value: float) -> str:
    """Four significant digits, so that a column of metrics lines up."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:#.4g}".removesuffix(".")


def format_size(num_bytes: int) -> str:
    """Bytes as a person reads them, in binary units."""
    size, units = float(num_bytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= 1024 and unit != "TiB":
        size, unit = size / 1024, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def mark_commands(text: str) -> Markup:
    """Escaped text with what stands in `backticks` as code."""
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if index % 2 else escape(part)
        for index, part in enumerate(text.split("`"))
    )
