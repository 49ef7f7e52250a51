"""The user's module: four functions, and what it may add."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from data.record import Record
from training.errors import WorkloadError

if TYPE_CHECKING:
    from torch import Tensor, nn

Fields = Mapping[str, Any]
Sums = dict[str, tuple[float, float]]
"""For each metric its total and its weight: the metric is the quotient of the sums."""
Scorer = Callable[[Iterable[Fields]], Sums]

REQUIRED = ("records", "model", "collate", "loss")


class Workload:
    """A checked workload module: calls go straight to the user's functions.

    records(source), model(**params), collate(records), loss(output, target) are required;
    ingest(destination, **params), metrics(output, target), baselines(train),
    predict(model, rows) and example are optional.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def records(self, source: Path) -> Iterator[Record]:
        return iter(self.module.records(source))

    def model(self, params: Mapping[str, Any]) -> "nn.Module":
        model: nn.Module = self.module.model(**params)
        return model

    def collate(self, records: Sequence[Fields]) -> "tuple[Tensor, Tensor]":
        batch: tuple[Tensor, Tensor] = self.module.collate(records)
        return batch

    def loss(self, output: "Tensor", target: "Tensor") -> "Tensor":
        loss: Tensor = self.module.loss(output, target)
        return loss

    def metrics(self, output: "Tensor", target: "Tensor") -> Sums:
        """The user's metrics, or the mean loss weighted by samples."""
        if hasattr(self.module, "metrics"):
            sums: Sums = self.module.metrics(output, target)
            return sums
        num_samples = float(len(target))
        return {"loss": (self.loss(output, target).item() * num_samples, num_samples)}

    def baselines(self, train: Iterable[Fields]) -> dict[str, Scorer]:
        """Simple predictors fitted to the training records, by name; none without the function."""
        if not hasattr(self.module, "baselines"):
            return {}
        scorers: dict[str, Scorer] = self.module.baselines(train)
        return scorers

    def predict(self, model: "nn.Module", rows: list[dict[str, Any]]) -> list[Any]:
        """The user's answers to rows, or the model's raw output."""
        import torch

        with torch.inference_mode():
            if hasattr(self.module, "predict"):
                return list(self.module.predict(model, rows))
            inputs, _ = self.collate(rows)
            return list(model(inputs).tolist())

    @property
    def ingest(self) -> Callable[..., None] | None:
        return getattr(self.module, "ingest", None)

    @property
    def example(self) -> list[dict[str, Any]] | None:
        """Rows that the registered model answers."""
        return getattr(self.module, "example", None)


def load_workload(name: str, root: Path) -> Workload:
    """Import and check the workload module, with `root` (the workspace) on sys.path.

    Raises WorkloadError naming params.yaml's field, the module and the remedy.
    """
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    field = "params.yaml: workload.module"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise WorkloadError(
                f"{field}: there is no module '{name}' under {root}; "
                f"write {name.replace('.', '/')}.py or correct the name"
            ) from None
        raise WorkloadError(
            f"{field}: importing '{name}' failed: it needs '{error.name}', "
            "which is not installed; install it or remove the import"
        ) from error
    except Exception as error:
        raise WorkloadError(
            f"{field}: importing '{name}' failed: {type(error).__name__}: {error}"
        ) from error
    missing = [function for function in REQUIRED if not callable(getattr(module, function, None))]
    if missing:
        raise WorkloadError(
            f"{field}: {module.__file__} lacks {', '.join(f'{f}()' for f in missing)}; "
            f"a workload has {', '.join(f'{f}()' for f in REQUIRED)}"
        )
    return Workload(module)


def check_model_params(workload: Workload, params: Mapping[str, Any]) -> None:
    """Raise WorkloadError for a name in train.model that the workload's model() does not take."""
    signature = inspect.signature(workload.module.model)
    try:
        signature.bind(**params)
    except TypeError as error:
        raise WorkloadError(
            f"params.yaml: train.model: {error}; {workload.module.__name__}.model{signature}"
        ) from None
