"""A trained model becomes a model version in MLflow, and the champion only if it is better.

A registration may be killed at any moment and is then called again: a digest of all that it is of
marks what it has made, so that one version comes of it, whole.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

import data.record
from storage.errors import ConvoyError
from training.champion import PREVIOUS_TAG, REASON_TAG, judge, seat
from training.errors import RegistryError
from training.evaluate import Metrics
from training.scoring import load_weights
from training.tracking import METRIC_TAG, check_tracking, open_client
from training.workload import Workload

_DIGEST_TAG = "convoy.registration"
"""What a logged model and a version are the registration of."""
_OF_THE_CALL = ("prefect.flow_run_id",)
"""Lineage that another call of the same registration may have otherwise."""
_EXPORTED_BY_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
_STAGING = "convoy-model-"
_SERVED_PACKAGES = ("mlflow", "torch", "numpy", "pandas", "safetensors")


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
    _remove_staging()
    digest = _digest_registration(weights, model_params, metrics, run_id, tags)
    try:
        with _without_exports():
            import mlflow

            # MLflow's store asks a client of its own for the model, by what is set globally.
            mlflow.set_tracking_uri(tracking_uri)
            mlflow.set_registry_uri(tracking_uri)
            client = open_client(tracking_uri)
            present = _find_version(client, name, digest)
            if present is None:
                model_id = _find_logged(client, run_id, digest)
                if model_id is None:
                    model_id = _log_model(workload, code, weights, model_params, run_id, digest)
                _ensure_registered(client, name)
                verdict = judge(client, name, metrics, tags)
                # Whole in one transaction: tags set afterwards would be missing after a kill.
                present = client.create_model_version(
                    name,
                    f"models:/{model_id}",
                    run_id=run_id,
                    model_id=model_id,  # a server refuses a source not told to be that model's
                    tags={k: v[:5000] for k, v in tags.items()}
                    | {
                        f"{METRIC_TAG}{metrics.primary}": repr(metrics.primary_value),
                        _DIGEST_TAG: digest,
                        PREVIOUS_TAG: verdict.previous or "",
                        REASON_TAG: verdict.reason,
                    },
                )
            _close_run(client, run_id)
            verdict = seat(client, name, present, metrics, tags)
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
    except ConvoyError:
        raise
    except Exception as error:
        raise RegistryError(
            f"MLflow at {tracking_uri} did not register {name} ({type(error).__name__}: {error}); "
            "mend it and run `convoy stage register`"
        ) from error


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
    found = client.search_model_versions(f"name = '{name}' and tags.`{_DIGEST_TAG}` = '{digest}'")
    return found[0] if found else None


def _find_logged(client: Any, run_id: str, digest: str) -> str | None:
    """The model that an earlier call logged whole; what it logged in part is deleted."""
    experiment = client.get_run(run_id).info.experiment_id
    whole = None
    for model in client.search_logged_models([experiment], f"source_run_id = '{run_id}'"):
        if model.tags.get(_DIGEST_TAG) != digest:
            continue
        if str(model.status) == "READY":
            whole = model.model_id
        else:
            client.delete_logged_model(model.model_id)
    return whole


def _close_run(client: Any, run_id: str) -> None:
    """Logging a model opens its run again: after a kill it would be said to go on for ever."""
    if client.get_run(run_id).info.status == "RUNNING":
        client.set_terminated(run_id, "FINISHED")


def _remove_staging() -> None:
    """Remove what killed calls left in the folder for temporary files."""
    for left in Path(tempfile.gettempdir()).glob(f"{_STAGING}*"):
        pid = left.name.removeprefix(_STAGING).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _log_model(
    workload: Workload,
    code: Path,
    weights: Path,
    model_params: Mapping[str, Any],
    run_id: str,
    digest: str,
) -> str:
    import mlflow
    import pandas as pd

    example = workload.example
    prefix = f"{_STAGING}{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as staging,
        mlflow.start_run(run_id),
        warnings.catch_warnings(),
    ):
        spec = Path(staging) / "spec.json"
        module = workload.module.__name__
        spec.write_text(json.dumps({"workload": module, "model": dict(model_params)}))
        signature = _answer_anything()
        if example:
            model = load_weights(workload, weights, dict(model_params))
            answers: Any = workload.predict(model, example)
            if all(isinstance(answer, bool | int | float | str) for answer in answers):
                answers = pd.Series(answers)  # a bare list would have no type
            signature = _accept_any_value(
                mlflow.models.infer_signature(pd.DataFrame(example), answers)
            )
        if not example:
            # It would warn amid a run, of what docs/bring-your-own.md says.
            warnings.filterwarnings("ignore", "(?s).*An input example was not provided")
        info = mlflow.pyfunc.log_model(
            name="model",
            tags={_DIGEST_TAG: digest},
            python_model=str(Path(__file__).with_name("served_model.py")),
            artifacts={"weights": str(weights), "spec": str(spec)},
            code_paths=_stage_code(module, code, Path(staging)),
            signature=signature,
            input_example=pd.DataFrame(example) if example else None,
            pip_requirements=[f"{p}=={version(p).split('+')[0]}" for p in _SERVED_PACKAGES],
        )
        model_id: str = info.model_id
        return model_id


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


def _accept_any_value(signature: Any) -> Any:
    """The signature with numbers of any type, and anything at all where an example had None: MLflow
    would refuse 33 where an example had 33.0, a missing number everywhere, and of the columns that
    pandas reads from parquet the categories and the dates.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema
    from mlflow.types.schema import AnyType

    numbers = (DataType.integer, DataType.long, DataType.float, DataType.double)
    columns = [
        ColSpec(AnyType(), name=column.name, required=column.required)  # type: ignore[no-untyped-call]
        if column.type in numbers or not column.required
        else column
        for column in signature.inputs
    ]
    return ModelSignature(inputs=Schema(columns), outputs=signature.outputs)


def _answer_anything() -> Any:
    """The signature of a model without an example: rows are not looked at before they are answered,
    and MLflow does not warn that it could not infer one.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    answer = ColSpec(AnyType())  # type: ignore[no-untyped-call]
    return ModelSignature(outputs=Schema([answer]))


def _stage_code(module: str, code: Path, staging: Path) -> list[str]:
    """Copies of the workload's code, data.record and data.values, to be imported by name."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    top = staging / "code" / module.split(".")[0]
    if code.is_dir():
        shutil.copytree(code, top, ignore=ignored)
        workload_copy = top
    else:
        workload_copy = staging / "code" / code.name
        workload_copy.parent.mkdir()
        shutil.copy(code, workload_copy)
    folder = Path(data.record.__file__).parent
    package = staging / "code" / "data"
    package.mkdir()
    for source in ("__init__.py", "record.py", "values.py"):
        shutil.copy(folder / source, package)
    return [str(workload_copy), str(package)]


def _ensure_registered(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
