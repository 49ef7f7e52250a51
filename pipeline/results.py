"""What the stages of a workspace left, read back."""

import json
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel

from data.errors import ManifestError
from data.manifest import read_manifest
from data.upload import read_receipt
from pipeline import workspace
from pipeline.errors import WorkspaceError
from pipeline.stages import Placement, read_train_report
from training.evaluate import Metrics
from training.registry import ModelVersion
from training.spec import STEPS_FILE


def read_results() -> dict[str, BaseModel]:
    """The results that are there of shard, upload, train, evaluate and register, by stage."""
    readers: dict[str, Callable[[], BaseModel]] = {
        "shard": lambda: read_manifest(workspace.MANIFEST),
        "upload": read_placement,
        "train": read_train_report,
        "evaluate": lambda: workspace.read_result(
            workspace.EVALUATED / "evaluation.json", Metrics, "evaluate"
        ),
        "register": lambda: workspace.read_result(
            workspace.REGISTERED / "model_version.json", ModelVersion, "register"
        ),
    }
    results: dict[str, BaseModel] = {}
    for stage, read in readers.items():
        try:
            results[stage] = read()
        except (ManifestError, WorkspaceError):
            continue  # not run yet, or to be run again: `convoy run` says why
    return results


def read_steps() -> list[dict[str, float]]:
    """The logged steps of the last training."""
    text = (workspace.TRAINED / STEPS_FILE).read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_placement() -> Placement:
    """The receipts of all regions. Raises ManifestError when one is of another version."""
    manifest = read_manifest(workspace.MANIFEST)
    paths: list[Path] = sorted(workspace.RECEIPTS.glob("*.json"))
    return Placement(receipts=tuple(read_receipt(path, manifest) for path in paths))
