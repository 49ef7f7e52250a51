"""`convoy status`: the last runs, the champion, and what DVC would redo."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.environment import find_services
from pipeline.config import Config
from pipeline.stages import STAGES
from pipeline.versioning import check_repository, find_stale
from training.tracking import RunSummary, read_champion, read_runs


def main(options: argparse.Namespace) -> int:
    root = Path.cwd()
    config = Config.load()
    check_repository(root, require_clean=False)
    runs: list[RunSummary] = []
    champion = None
    if _has_history(config.tracking_uri):
        runs = read_runs(config.tracking_uri, config.registration.experiment)
        champion = read_champion(config.tracking_uri, config.registration.model_name)
    stale = {name: find_stale(root, name) for name in STAGES}
    services = find_services(root)
    if options.json:
        content: dict[str, Any] = {
            "runs": [run.model_dump(mode="json") for run in runs],
            "champion": champion.model_dump(mode="json") if champion else None,
            "stages": {name: reasons or "up to date" for name, reasons in stale.items()},
            "services": services,
        }
        print(json.dumps(content, indent=2))
        return 0
    console = Console()
    console.print(_runs_table(runs) if runs else "no run yet: `convoy run`")
    if champion:
        console.print(
            f"champion: {champion.name} version {champion.version}, "
            f"{champion.metric} {champion.value:.4f}, manifest {champion.manifest[:12]}"
        )
    else:
        console.print(f"champion: none yet for {config.registration.model_name}")
    for name, reasons in stale.items():
        because = "; ".join(reasons[:2]) or "up to date"
        console.print(f"{name:>9}: {because}", highlight=False, soft_wrap=True)
    for name, url in (services or {}).items():
        console.print(f"{name:>9}: {url}", soft_wrap=True)
    return 0


def _has_history(tracking_uri: str) -> bool:
    """Whether there is anything to read: MLflow would make a missing database first."""
    prefix, _, path = tracking_uri.partition("sqlite:///")
    return bool(prefix) or Path(path).exists()


def _runs_table(runs: list[RunSummary]) -> Table:
    table = Table(title="Last runs", title_justify="left")
    for column in ("started", "name", "status", "seconds", "metrics"):
        table.add_column(column)
    for run in runs:
        started = datetime.fromtimestamp(run.started_seconds, UTC)
        metrics = ", ".join(f"{k.removeprefix('holdout.')} {v:.4f}" for k, v in run.metrics.items())
        seconds = "" if run.seconds is None else f"{run.seconds:.0f}"
        table.add_row(f"{started:%Y-%m-%d %H:%M} UTC", run.name, run.status, seconds, metrics)
    return table
