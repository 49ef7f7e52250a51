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

from data.manifest import Manifest
from pipeline.plots import draw_curve
from pipeline.progress import Progress
from pipeline.results import read_steps
from pipeline.stages import Placement, TrainReport
from training.evaluate import Metrics
from training.registry import ModelVersion

Rows = list[dict[str, Any]]

_SVG = "http://www.w3.org/2000/svg"
_COLORS = "background:#fff;--ink:#222;--muted:#555;--line:#ccc;--curve:#1667b7;--warn:#b45309"


def publish(stage: str, result: BaseModel, tracking_uri: str) -> None:
    """Show a stage's result in the UI."""
    match result:
        case Manifest():
            _table("shards", _shard_rows(result), f"Version `{result.digest}`")
        case Placement():
            _table("placement", _placement_rows(result), "Sealed shards by region")
        case TrainReport():
            _publish_training(result)
        case Metrics():
            _table("metrics", _metric_rows(result), f"Held-out records; {result.primary} decides")
        case ModelVersion():
            _publish_model(result, tracking_uri)
        case _:
            create_markdown_artifact(f"`{result.model_dump_json()}`", key=stage)


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
        description = f"{progress.stage}: {progress.done}/{progress.total} {progress.unit}"
        known = self._ids.get(progress.stage)
        if known is None:
            created: Any = create_progress_artifact(
                percent, key=f"{progress.stage}-progress", description=description
            )
            self._ids[progress.stage] = created
        else:
            update_progress_artifact(known, percent, description=f"{description} {progress.note}")


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


def _placement_rows(placement: Placement) -> Rows:
    return [
        {
            "region": receipt.region,
            "shards": len(receipt.placed),
            "sealed bytes": sum(placed.num_bytes for placed in receipt.placed),
            "withheld": ", ".join(
                f"{e.jurisdiction} ({e.num_records} records)" for e in receipt.withheld
            ),
        }
        for receipt in placement.receipts
    ]


def _publish_training(report: TrainReport) -> None:
    lines = read_steps()
    steps = [int(line["step"]) for line in lines]
    drawing = draw_curve("loss", steps, [line["loss"] for line in lines], "loss")
    # As an image it has no page to take its colours from.
    standalone = drawing.replace("<svg ", f'<svg xmlns="{_SVG}" style="{_COLORS}" ', 1)
    curve = base64.b64encode(standalone.encode()).decode()
    excluded = [
        f"| {e.jurisdiction} | {e.num_records} | {e.reason} |" for e in report.excluded
    ] or ["| none | 0 | |"]
    create_markdown_artifact(
        f"![loss](data:image/svg+xml;base64,{curve})\n\n"
        f"{report.steps} steps on {report.world_size} workers, final loss "
        f"{report.final_loss:.4f}, {report.samples_per_second:.0f} samples/s, "
        f"{sum(report.num_records.values())} records read.\n\n"
        "| excluded | records | reason |\n|---|---|---|\n" + "\n".join(excluded),
        key="training",
        description="Loss curve and what was not read",
    )


def _metric_rows(metrics: Metrics) -> Rows:
    def row(whose: str, score: Mapping[str, float], baselines: Mapping[str, Any]) -> dict[str, Any]:
        others = {name: values.get(metrics.primary) for name, values in baselines.items()}
        return {"records of": whose, metrics.primary: score.get(metrics.primary), **others}

    rows = [row("all", metrics.overall.model, metrics.overall.baselines)]
    for jurisdiction, score in metrics.by_jurisdiction.items():
        rows.append(row(jurisdiction, score.model, score.baselines))
    return rows


def _publish_model(version: ModelVersion, tracking_uri: str) -> None:
    if tracking_uri.startswith("http"):
        create_link_artifact(
            f"{tracking_uri}/#/models/{version.name}/versions/{version.version}",
            link_text=f"{version.name} version {version.version} in MLflow",
            key="model",
        )
    create_markdown_artifact(
        f"**{version.name} version {version.version}**: {version.metric} {version.value:.4f}. "
        f"{'Champion' if version.champion else 'Not the champion'}: {version.reason}.",
        key="model-version",
    )


def _table(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    create_table_artifact(list(rows), key=key, description=description)
