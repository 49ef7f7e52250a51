"""The registered model, as MLflow loads it (models from code): it needs torch and the workload.

Stored inside the model beside the workload's own code; nothing of the training set-up is used.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from safetensors.torch import load_model

from data.record import Records


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """Answers rows with the workload's predict(model, rows), or without one with the model's raw
    output to what collate() makes of them."""

    def load_context(self, context: Any) -> None:
        spec = json.loads(Path(context.artifacts["spec"]).read_bytes())
        self.workload = importlib.import_module(spec["workload"])
        self.model = self.workload.model(**spec["model"])
        load_model(self.model, context.artifacts["weights"])
        self.model.eval()

    # For another type hint MLflow would warn that it is no schema; the signature is one.
    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> list[Any]:
        rows = _rows(model_input)
        with torch.inference_mode():
            if hasattr(self.workload, "predict"):
                return list(self.workload.predict(self.model, rows))
            return list(self.model(self._collate(rows)).tolist())

    def _collate(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        """The model's input. Raises MlflowException, which a server answers as a bad request."""
        try:
            inputs, _ = self.workload.collate(Records.of(rows))
        except Exception as error:
            name = self.workload.__name__
            lacking = f"field '{error.args[0]}'" if _is_field(error, rows) else type(error).__name__
            raise MlflowException.invalid_parameter_value(
                f"the workload {name} has no predict(), so its collate() reads the rows, and it "
                f"stumbles over {lacking}: give rows with all fields that collate() reads, the one "
                "to predict as well (any value of its kind will do), or write predict(model, rows) "
                f"into {name} and register the model anew"
            ) from error
        result: torch.Tensor = inputs
        return result


def _rows(model_input: Any) -> list[dict[str, Any]]:
    """Rows as collate() met them in training: a missing value is None, where pandas has NaN."""
    if isinstance(model_input, pd.DataFrame):
        return [
            {str(k): None if _is_missing(v) else v for k, v in row.items()}
            for row in model_input.to_dict("records")
        ]
    return list(model_input)


def _is_field(error: Exception, rows: list[dict[str, Any]]) -> bool:
    """Whether it is a field that no row has, and no value of theirs."""
    return (
        isinstance(error, KeyError)
        and bool(error.args)
        and isinstance(error.args[0], str)
        and not any(error.args[0] in (*row, *row.values()) for row in rows)
    )


def _is_missing(value: Any) -> bool:
    return value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value)


mlflow.models.set_model(ServedModel())
