"""What the stages left in a workspace, as far as it is there, for the report.

A stage that has not run, a broken file and a result of other inputs are said, never raised.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from data.manifest import Manifest, read_manifest
from data.upload import UploadReceipt, read_receipt
from pipeline import workspace
from pipeline.config import Config
from pipeline.errors import WorkspaceError
from pipeline.lineage import digest_training
from pipeline.speed import StepSplit, read_rank_steps
from pipeline.stages import TrainReport
from storage.errors import ConvoyError
from training.evaluate import Metrics
from training.registry import ModelVersion
from training.spec import STEPS_FILE

Noun = TypeVar("Noun")


class LoggedStep(StepSplit, frozen=True, extra="ignore"):
    """One line of the step log, as far as the report shows it."""

    loss: float
    """Mean over the workers and the steps since the line before."""
    lr: float
    step_seconds: float
    samples_per_second: float


@dataclass(frozen=True)
class Findings:
    """The nouns of the last run; None where a stage left none that can be read."""

    manifest: Manifest | None
    receipts: Mapping[str, UploadReceipt]
    """By region."""
    training: TrainReport | None
    steps: tuple[LoggedStep, ...]
    ranks: Mapping[int, tuple[StepSplit, ...]]
    """The same of each rank alone."""
    metrics: Metrics | None
    model_version: ModelVersion | None
    problems: Mapping[str, str]
    """By stage: what is missing, broken or of other inputs, with the command to run."""


def read_findings(config: Config, root: Path) -> Findings:
    """Read what the last run left in the workspace."""
    root = root.resolve()
    problems: dict[str, str] = {}

    def attempt(stage: str, read: Callable[[], Noun]) -> Noun | None:
        try:
            return read()
        except ConvoyError as error:
            problems.setdefault(stage, str(error).replace(f"{root}/", ""))
            return None

    def result(path: Path, kind: type[workspace.Result], stage: str) -> workspace.Result | None:
        return attempt(stage, partial(workspace.read_result, root / path, kind, stage))

    dataset = workspace.DATASETS / config.dataset
    if not (root / dataset).is_dir():
        problems["ingest"] = f"{dataset} is missing: run `convoy stage ingest`"
    manifest = attempt("shard", partial(read_manifest, root / workspace.MANIFEST))
    receipts: dict[str, UploadReceipt] = {}
    if manifest is None:
        problems["upload"] = (
            "without a manifest nothing can be placed: run `convoy stage upload` next"
        )
    else:
        for region in list_regions(config, root):
            path = root / workspace.RECEIPTS / f"{region}.json"
            receipt = attempt("upload", partial(read_receipt, path, manifest))
            if receipt is not None:
                receipts[region] = receipt
    training = result(workspace.TRAINED / "report.json", TrainReport, "train")
    steps = attempt("train", partial(_read_steps, root / workspace.TRAINED / STEPS_FILE))
    ranks = attempt("train", partial(read_rank_steps, root / workspace.TRAINED))
    metrics = result(workspace.EVALUATED / "evaluation.json", Metrics, "evaluate")
    model_version = result(workspace.REGISTERED / "model_version.json", ModelVersion, "register")
    if manifest is not None and training is not None:
        attempt("train", partial(_check_training, config, root, manifest, training))
    if manifest is not None and metrics is not None:
        attempt("evaluate", partial(_check_metrics, manifest, metrics))
    if training is not None and metrics is not None and model_version is not None:
        attempt("register", partial(_check_registered, training, metrics, model_version))
    return Findings(
        manifest, receipts, training, steps or (), ranks or {}, metrics, model_version, problems
    )


def list_regions(config: Config, root: Path) -> list[str]:
    """The regions to upload to, and others that hold shards by a receipt of earlier parameters."""
    configured = [region.name for region in config.upload_regions]
    receipts = sorted(path.stem for path in (root / workspace.RECEIPTS).glob("*.json"))
    return configured + [name for name in receipts if name not in configured]


def _read_steps(path: Path) -> tuple[LoggedStep, ...]:
    try:
        lines = path.read_bytes().splitlines()
        return tuple(LoggedStep.model_validate_json(line) for line in lines)
    except FileNotFoundError:
        raise WorkspaceError(f"{path} is missing: run `convoy stage train`") from None
    except ValidationError as error:
        raise WorkspaceError(
            f"{path}: {error.errors()[0]['msg']}: run `convoy stage train` again"
        ) from None


def _check_training(config: Config, root: Path, manifest: Manifest, training: TrainReport) -> None:
    """Raise WorkspaceError unless the training is of the present data, code and parameters."""
    code = root / config.workload.code
    here = config.model_copy(update={"workload": config.workload.model_copy(update={"code": code})})
    if not code.exists():
        raise WorkspaceError(f"params.yaml: workload.code: there is no {code}")
    readable, _ = config.residency.split_readable(manifest.of("train"), config.site.name)
    if digest_training(here, manifest, readable) != training.fingerprint:
        raise WorkspaceError(
            f"{workspace.TRAINED} is of other data, code, rules or parameters than the present "
            "ones: run `convoy stage train` to train on these"
        )


def _check_metrics(manifest: Manifest, metrics: Metrics) -> None:
    held_out = manifest.count_records("holdout")
    if any(held_out[name] != count for name, count in metrics.num_records.items()):
        raise WorkspaceError(
            f"{workspace.EVALUATED} is of another version of the dataset: "
            "run `convoy stage evaluate`"
        )


def _check_registered(training: TrainReport, metrics: Metrics, model_version: ModelVersion) -> None:
    of_this_run = model_version.run_id == training.mlflow_run_id
    value = metrics.overall.model.get(model_version.metric)
    if not of_this_run or value != model_version.value:
        raise WorkspaceError(
            f"{workspace.REGISTERED} is of an earlier "
            f"{'evaluation' if of_this_run else 'training'}: run `convoy stage register`"
        )
