"""A trained model becomes a model version in MLflow, and the champion only if it is better."""

import contextlib
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
from training.errors import RegistryError
from training.evaluate import Metrics
from training.scoring import load_weights
from training.tracking import CHAMPION, METRIC_TAG, check_tracking, find_champion, open_client
from training.workload import Workload

_HELD_OUT_TAGS = ("convoy.manifest", "convoy.excluded")
"""Lineage that decides which records a model is measured on."""
_EXPORTED_BY_MLFLOW = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
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

    `code` is the workload's file or package, stored in the model so that it loads anywhere.
    Raises RegistryError when MLflow cannot be reached or refuses.
    """
    check_tracking(tracking_uri)
    try:
        with _without_exports():
            client = open_client(tracking_uri)
            model_id = _log_model(workload, code, weights, model_params, tracking_uri, run_id)
            _ensure_registered(client, name)
            created = client.create_model_version(
                name,
                f"models:/{model_id}",
                run_id=run_id,
                model_id=model_id,  # a server refuses a source not told to be that model's
                tags={k: v[:5000] for k, v in tags.items()},
            )
            client.set_model_version_tag(
                name, created.version, f"{METRIC_TAG}{metrics.primary}", repr(metrics.primary_value)
            )
            judged = _judge(client, name, int(created.version), run_id, metrics, tags)
            answers = "predict()" if workload.has_predict else "raw output"
            return judged.model_copy(update={"answers": answers})
    except ConvoyError:
        raise
    except Exception as error:
        raise RegistryError(
            f"MLflow at {tracking_uri} did not register {name} ({type(error).__name__}: {error}); "
            "mend it and run `convoy stage register`"
        ) from error


def _log_model(
    workload: Workload,
    code: Path,
    weights: Path,
    model_params: Mapping[str, Any],
    tracking_uri: str,
    run_id: str,
) -> str:
    import mlflow
    import pandas as pd

    example = workload.example
    mlflow.set_tracking_uri(tracking_uri)
    mlflow.set_registry_uri(tracking_uri)
    with (
        tempfile.TemporaryDirectory(prefix="convoy-model-") as staging,
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


def _count_apart(difference: float, metrics: Metrics) -> str:
    """Accuracies differ by few records where few are held out."""
    count = sum(metrics.num_records.values())
    return f", which is {round(abs(difference) * count)} of {count} held-out records"


def _advise_comparison(champion: Any, wins: bool) -> str:
    """What makes two models comparable that were measured on other data or fields."""
    number = champion.version
    revision = champion.tags.get("git.revision", "")[:12]
    back = f"check out {revision}, its revision" if revision else "check out its revision"
    reset = (
        f"If version {number} should be the champion again, move the alias '{CHAMPION}' in MLflow"
        if wins
        else f"If version {number} should no longer count, set register.model_name anew, or move "
        f"the alias '{CHAMPION}' in MLflow"
    )
    return (
        f". The two were measured on different versions of the dataset, perhaps on different "
        f"held-out records: for a comparison on the same ones {back}, in a copy of this folder, "
        f"give it the present input and run it. {reset}"
    )


def _judge(
    client: Any,
    name: str,
    version_number: int,
    run_id: str,
    metrics: Metrics,
    tags: Mapping[str, str],
) -> ModelVersion:
    """Move the alias if there is no champion or the primary metric beats its."""
    champion = find_champion(client, name)
    value = metrics.primary_value
    wins, reason = True, "there was no champion"
    if champion is not None:
        tag = champion.tags.get(f"{METRIC_TAG}{metrics.primary}")
        if tag is None:
            wins = False
            reason = f"champion version {champion.version} has no metric {metrics.primary}"
        else:
            wins = value < float(tag) if metrics.goal == "minimize" else value > float(tag)
            reason = (
                f"{metrics.primary} {value:.4f} {'beats' if wins else 'does not beat'} "
                f"{float(tag):.4f} of version {champion.version}"
            )
            if metrics.primary == "accuracy":
                reason += _count_apart(value - float(tag), metrics)
            if any(champion.tags.get(key) != tags.get(key) for key in _HELD_OUT_TAGS):
                reason += _advise_comparison(champion, wins)
    if wins:
        client.set_registered_model_alias(name, CHAMPION, str(version_number))
    return ModelVersion(
        name=name,
        version=version_number,
        run_id=run_id,
        metric=metrics.primary,
        value=value,
        champion=wins,
        previous_champion=int(champion.version) if champion else None,
        reason=reason,
    )
