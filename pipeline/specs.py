"""What the workers of a stage are told, from the configuration."""

from pathlib import Path
from typing import Any

from pipeline import workspace
from pipeline.config import Config
from pipeline.runs import Run
from training.spec import WEIGHTS_FILE, EvaluationSpec, TrainSpec


def train_spec(config: Config, root: Path, run: Run) -> TrainSpec:
    """A training run, for its workers."""
    return TrainSpec(
        **common_fields(config, root, run.mlflow_run_id, run.directory),
        config=config.train,
        primary=config.evaluate.primary,
        fingerprint=run.fingerprint,
        identity=run.identity,
        tracking_uri=config.tracking_uri,
    )


def evaluation_spec(config: Config, root: Path, run_id: str, num_workers: int) -> EvaluationSpec:
    """The scoring of the trained model, for its workers."""
    return EvaluationSpec(
        **common_fields(config, root, run_id, root / workspace.EVALUATION),
        weights=root / workspace.TRAINED / WEIGHTS_FILE,
        model=config.train.model,
        batch=config.evaluate.batch,
        world_size=num_workers,
        sharded=config.train.dims.is_sharded,
        restarts=config.train.max_restarts,
    )


def common_fields(config: Config, root: Path, run_id: str, directory: Path) -> dict[str, Any]:
    """What every launched worker is told."""
    return {
        "root": root,
        "workload": config.workload.module,
        "manifest": root / workspace.MANIFEST,
        "region": config.site,
        "residency": config.residency,
        "access_log": root / workspace.ACCESS_LOG,
        "audit": config.audit,
        "run_directory": directory,
        "mlflow_run_id": run_id,
    }
