"""A trained model becomes a model version in MLflow, and the champion only if it is better.

A registration may be killed at any moment and is then called again: a digest of all that it is of
marks what it has made, so that one version comes of it, whole.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from storage.errors import ConvoyError
from training.champion import PREVIOUS_TAG, REASON_TAG, judge, seat
from training.errors import RegistryError
from training.evaluate import Metrics
from training.logged_model import DIGEST_TAG, find_logged, log_model, remove_staging
from training.tracking import METRIC_TAG, check_tracking, open_client
from training.workload import Workload

_OF_THE_CALL = ("prefect.flow_run_id",)
"""Lineage that another call of the same registration may have otherwise."""
_EXPORTED_BY_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")


class ModelVersion(BaseModel, frozen=True, extra="forbid"):
    """A registered model version, and whether it became the champion."""

    name: str
    version: int
    run_id: str
    metric: str
    value: float
    champion: bool
    previous_champion: int | None
    reason: str
    """Why the alias moved or stayed."""
    answers: Literal["predict()", "raw output"] = "predict()"
    """What the registered model gives: what the workload's predict() does, or the model's output to
    what collate() makes of the rows."""

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


def register_model(
    workload: Workload,
    code: Path,
    weights: Path,
    model_params: Mapping[str, Any],
    metrics: Metrics,
    *,
    name: str,
    tracking_uri: str,
    run_id: str,
    tags: Mapping[str, str],
) -> ModelVersion:
    """Log the model to its run, register it with its lineage as tags, and hold the champion's gate.

    `code` is the workload's file or package, stored in the model so that it loads anywhere. The
    same registration again gives the version that there is. Raises RegistryError when MLflow cannot
    be reached or refuses.
    """
    check_tracking(tracking_uri)
    remove_staging()
    digest = _digest_registration(weights, model_params, metrics, run_id, tags)
    try:
        with _reach(tracking_uri) as client:
            present = _find_version(client, name, digest)
            if present is None:
                model_id = find_logged(client, run_id, digest)
                if model_id is None:
                    model_id = log_model(workload, code, weights, model_params, run_id, digest)
                present = _create_version(client, name, model_id, run_id, metrics, tags, digest)
            _close_run(client, run_id)
            verdict = seat(client, name, present, metrics, tags)
    except ConvoyError:
        raise
    except Exception as error:
        raise RegistryError(
            f"MLflow at {tracking_uri} did not register {name} ({type(error).__name__}: {error}); "
            "mend it and run `convoy stage register`"
        ) from error
    return ModelVersion(
        name=name,
        version=int(present.version),
        run_id=run_id,
        metric=metrics.primary,
        value=metrics.primary_value,
        champion=verdict.wins,
        previous_champion=int(verdict.previous) if verdict.previous else None,
        reason=verdict.reason,
        answers="predict()" if workload.has_predict else "raw output",
    )


@contextlib.contextmanager
def _reach(tracking_uri: str) -> Iterator[Any]:
    """A client of MLflow, whose fluent API reaches the same for so long."""
    with _without_exports():
        import mlflow

        # MLflow's store asks a client of its own for the model, by what is set globally.
        mlflow.set_tracking_uri(tracking_uri)
        mlflow.set_registry_uri(tracking_uri)
        yield open_client(tracking_uri)


def _create_version(
    client: Any,
    name: str,
    model_id: str,
    run_id: str,
    metrics: Metrics,
    tags: Mapping[str, str],
    digest: str,
) -> Any:
    _ensure_registered(client, name)
    verdict = judge(client, name, metrics, tags)
    # Whole in one transaction: tags set afterwards would be missing after a kill.
    return client.create_model_version(
        name,
        f"models:/{model_id}",
        run_id=run_id,
        model_id=model_id,  # a server refuses a source not told to be that model's
        tags={k: v[:5000] for k, v in tags.items()}
        | {
            f"{METRIC_TAG}{metrics.primary}": repr(metrics.primary_value),
            DIGEST_TAG: digest,
            PREVIOUS_TAG: verdict.previous or "",
            REASON_TAG: verdict.reason,
        },
    )


def _digest_registration(
    weights: Path,
    model_params: Mapping[str, Any],
    metrics: Metrics,
    run_id: str,
    tags: Mapping[str, str],
) -> str:
    content = {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "model": dict(model_params),
        "metrics": metrics.model_dump(mode="json"),
        "run": run_id,
        "tags": {k: v for k, v in tags.items() if k not in _OF_THE_CALL},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _find_version(client: Any, name: str, digest: str) -> Any:
    found = client.search_model_versions(f"name = '{name}' and tags.`{DIGEST_TAG}` = '{digest}'")
    return found[0] if found else None


def _close_run(client: Any, run_id: str) -> None:
    """Logging a model opens its run again: after a kill it would be said to go on for ever."""
    if client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, "FINISHED")


@contextlib.contextmanager
def _without_exports() -> Iterator[None]:
    """Take back the URIs that MLflow's fluent API exports: the next stage of this process, and
    every child of it, would take them for the user's wish.
    """
    before = {name: os.environ.get(name) for name in _EXPORTED_BY_MLFLOW}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _ensure_registered(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
