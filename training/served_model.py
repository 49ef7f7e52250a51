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
from safetensors.torch import load_model


class ServedModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """Answers rows with the workload's predict(model, rows), or with the model's raw output."""

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
            inputs, _ = self.workload.collate(rows)
            return list(self.model(inputs).tolist())


def _rows(model_input: Any) -> list[dict[str, Any]]:
    """Rows as collate() met them in training: a missing value is None, where pandas has NaN."""
    if isinstance(model_input, pd.DataFrame):
        return [
            {str(k): None if _is_missing(v) else v for k, v in row.items()}
            for row in model_input.to_dict("records")
        ]
    return list(model_input)


def _is_missing(value: Any) -> bool:
    return value is pd.NA or (isinstance(value, float) and value != value)


mlflow.models.set_model(ServedModel())
