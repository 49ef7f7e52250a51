"""What each stage left, as Prefect artifacts: counts, digests and metrics, never records."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from pydantic import BaseModel

from data.manifest import Manifest, read_manifest
from pipeline.plots import draw_curve, draw_timeline
from pipeline.progress import Progress
from pipeline.results import read_steps
from pipeline.stages import Placement, RawInput, TrainReport
from pipeline.workspace import MANIFEST
from training.evaluate import Metrics
from training.goodput import Goodput
from training.registry import ModelVersion

Rows = list[dict[str, Any]]
Scores = Mapping[str, Mapping[str, float]]

_SVG = "http://www.w3.org/2000/svg"
_STYLE = (
    "background:#fff;font-family:sans-serif;"
    "--ink:#222;--muted:#555;--line:#ccc;--curve:#1667b7;--warn:#b45309;--part-4:#7c3aed"
)


def publish(result: BaseModel, tracking_uri: str) -> None:
    """Show a stage's result in the UI."""
    match result:
        case Manifest():
            _table("shards", _shard_rows(result), f"Version `{result.digest}`")
        case Placement():
            rows = _placement_rows(result, read_manifest(MANIFEST))
            _table("placement", rows, "Sealed shards by region and jurisdiction")
        case TrainReport():
            _publish_training(result, tracking_uri)
        case Metrics():
            _table("metrics", _metric_rows(result), f"Held-out records; {result.primary} decides")
        case ModelVersion():
            _publish_model(result, tracking_uri)
        case RawInput():
            create_markdown_artifact(
                f"{result.num_files} files, {result.num_bytes:,} bytes in `{result.path}`",
                key="raw-input",
                description="What ingest brought",
            )
        case _:
            raise AssertionError(type(result))


def publish_stages(rows: Rows) -> None:
    """Which stages ran, how long, and which were up to date."""
    _table("stages", rows, "Stages of this flow run")


class ProgressArtifact:
    """A progress bar in the UI for each stage that reports."""

    def __init__(self) -> None:
        self._ids: dict[str, UUID] = {}

    def show(self, progress: Progress) -> None:
        if not progress.total:
            return
        percent = 100.0 * progress.done / progress.total
        description = str(progress)
        known = self._ids.get(progress.stage)
        if known is None and progress.done == progress.total:
            return  # nothing to watch
        if known is None:
            created: Any = create_progress_artifact(
                percent, key=f"{progress.stage}-progress", description=description
            )
            self._ids[progress.stage] = created
        else:
            update_progress_artifact(known, percent, description=description)


def _shard_rows(manifest: Manifest) -> Rows:
    shards = Counter(shard.jurisdiction for shard in manifest.shards)
    train = manifest.count_records("train")
    holdout = manifest.count_records("holdout")
    return [
        {
            "jurisdiction": jurisdiction,
            "shards": shards[jurisdiction],
            "training records": train[jurisdiction],
            "held-out records": holdout[jurisdiction],
        }
        for jurisdiction in sorted(shards)
    ]


def _placement_rows(placement: Placement, manifest: Manifest) -> Rows:
    """One row for each region and jurisdiction: what lies there, or why nothing does."""
    jurisdictions = {shard.name: shard.jurisdiction for shard in manifest.shards}
    rows: Rows = []
    for receipt in placement.receipts:
        num_shards: Counter[str] = Counter()
        num_bytes: Counter[str] = Counter()
        for placed in receipt.placed:
            num_shards[jurisdictions[placed.shard]] += 1
            num_bytes[jurisdictions[placed.shard]] += placed.num_bytes
        rows += [
            {
                "region": receipt.region,
                "jurisdiction": jurisdiction,
                "sealed shards": num_shards[jurisdiction],
                "sealed bytes": num_bytes[jurisdiction],
                "withheld": "",
            }
            for jurisdiction in sorted(num_shards)
        ]
        rows += [
            {
                "region": receipt.region,
                "jurisdiction": withheld.jurisdiction,
                "sealed shards": 0,
                "sealed bytes": 0,
                "withheld": f"{withheld.num_records} records: {withheld.reason}",
            }
            for withheld in receipt.withheld
        ]
    return rows


def _publish_training(report: TrainReport, tracking_uri: str) -> None:
    lines = read_steps()
    steps = [int(line["step"]) for line in lines]
    curve = _as_image(draw_curve("loss", steps, [line["loss"] for line in lines], "loss"))
    excluded = [
        f"| {e.jurisdiction} | {e.num_records} | {e.reason} |" for e in report.excluded
    ] or ["| none | 0 | |"]
    create_markdown_artifact(
        f"![loss]({curve})\n\n"
        f"{report.steps} steps on {report.world_size} workers, final loss "
        f"{report.final_loss:.4f}, {report.samples_per_second:.0f} samples/s, "
        f"{sum(report.num_records.values())} records read.\n\n"
        "| excluded | records | reason |\n|---|---|---|\n" + "\n".join(excluded),
        key="training",
        description="Loss curve and what was not read",
    )
    if report.goodput:
        _publish_goodput(report, report.goodput)
    _link(tracking_uri, f"runs/{report.mlflow_run_id}", "The run in MLflow", "mlflow-run")


def _publish_goodput(report: TrainReport, goodput: Goodput) -> None:
    timeline = _as_image(draw_timeline("timeline", report.stretches))
    seconds = [f"| {name} | {value:.1f} |" for name, value in goodput.model_dump().items()]
    incidents = [
        f"| {i.cause} | {'' if i.rank is None else i.rank} | {'' if i.node is None else i.node} "
        f"| {i.last_step} | {i.steps_lost} | {i.seconds_lost:.1f} | {i.message} |"
        for i in report.incidents
    ] or ["| none | | | | | | |"]
    create_markdown_artifact(
        f"![what the run did over its seconds]({timeline})\n\n"
        f"{100 * goodput.ratio:.0f} % of {goodput.total_seconds:.1f} s moved the training on.\n\n"
        "| what | seconds |\n|---|---|\n" + "\n".join(seconds) + "\n\n"
        "| incident | rank | node | step | steps lost | seconds lost | what |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(incidents),
        key="goodput",
        description="Where the time of the training went, and what went wrong",
    )


def _as_image(drawing: str) -> str:
    """A data URL: as an image it has no page to take colours and font from."""
    standalone = drawing.replace("<svg ", f'<svg xmlns="{_SVG}" style="{_STYLE}" ', 1)
    return f"data:image/svg+xml;base64,{base64.b64encode(standalone.encode()).decode()}"


def _metric_rows(metrics: Metrics) -> Rows:
    def row(whose: str, score: Mapping[str, float], baselines: Scores) -> dict[str, Any]:
        scores = {metrics.primary: score, **baselines}
        rounded = {
            name: round(values[metrics.primary], 4) if metrics.primary in values else None
            for name, values in scores.items()
        }
        return {"records of": whose, **rounded}

    rows = [row("all", metrics.overall.model, metrics.overall.baselines)]
    for jurisdiction, score in metrics.by_jurisdiction.items():
        rows.append(row(jurisdiction, score.model, score.baselines))
    return rows


def _publish_model(version: ModelVersion, tracking_uri: str) -> None:
    _link(
        tracking_uri,
        f"models/{version.name}/versions/{version.version}",
        f"{version.name} version {version.version} in MLflow",
        "mlflow-model",
    )
    create_markdown_artifact(
        f"**{version.name} version {version.version}**: {version.metric} {version.value:.4f}. "
        f"{'Champion' if version.champion else 'Not the champion'}: {version.reason}.",
        key="model-version",
    )


def _link(tracking_uri: str, page: str, text: str, key: str) -> None:
    """A link to the MLflow server; a database file has no pages."""
    if tracking_uri.startswith("http"):
        create_link_artifact(f"{tracking_uri}/#/{page}", link_text=text, key=key, description=text)


def _table(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    create_table_artifact(list(rows), key=key, description=description)
