"""What a registered model is made of: weights, the workload's code and a signature, in MLflow."""

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import data.record
from training.scoring import load_weights
from training.workload import Workload

DIGEST_TAG = "convoy.registration"
"""What a logged model and a version are the registration of."""
_STAGING = "convoy-model-"
_SERVED_PACKAGES = ("mlflow", "torch", "numpy", "pandas", "safetensors")


def find_logged(client: Any, run_id: str, digest: str) -> str | None:
    """The model that an earlier call logged whole; what it logged in part is deleted."""
    experiment = client.get_run(run_id).info.experiment_id
    whole = None
    for model in client.search_logged_models([experiment], f"source_run_id = '{run_id}'"):
        if model.tags.get(DIGEST_TAG) != digest:
            continue
        if str(model.status) == "READY":
            whole = model.model_id
        else:
            client.delete_logged_model(model.model_id)
    return whole


def log_model(
    workload: Workload,
    code: Path,
    weights: Path,
    model_params: Mapping[str, Any],
    run_id: str,
    digest: str,
) -> str:
    """Log the model to its run. Gives the logged model's id.

    `code` is the workload's file or package, stored in the model so that it loads anywhere.
    """
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
        if not example:
            # It would warn amid a run, of what docs/bring-your-own.md says.
            warnings.filterwarnings("ignore", "(?s).*An input example was not provided")
        info = mlflow.pyfunc.log_model(
            name="model",
            tags={DIGEST_TAG: digest},
            python_model=str(Path(__file__).with_name("served_model.py")),
            artifacts={"weights": str(weights), "spec": str(spec)},
            code_paths=_stage_code(module, code, Path(staging)),
            signature=_infer_signature(workload, weights, model_params, example)
            if example
            else _answer_anything(),
            input_example=pd.DataFrame(example) if example else None,
            pip_requirements=[f"{p}=={version(p).split('+')[0]}" for p in _SERVED_PACKAGES],
        )
        model_id: str = info.model_id
        return model_id


def remove_staging() -> None:
    """Remove what killed calls left in the folder for temporary files."""
    for left in Path(tempfile.gettempdir()).glob(f"{_STAGING}*"):
        pid = left.name.removeprefix(_STAGING).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _infer_signature(
    workload: Workload,
    weights: Path,
    model_params: Mapping[str, Any],
    example: list[dict[str, Any]],
) -> Any:
    import mlflow
    import pandas as pd

    model = load_weights(workload, weights, dict(model_params))
    answers: Any = workload.predict(model, example)
    if all(isinstance(answer, bool | int | float | str) for answer in answers):
        answers = pd.Series(answers)  # a bare list would have no type
    return _accept_any_value(mlflow.models.infer_signature(pd.DataFrame(example), answers))


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
