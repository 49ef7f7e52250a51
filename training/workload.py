"""The user's module: four functions, and what it may add."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from data.record import Record, Records
from training.errors import WorkloadError
from training.usercode import UserCode

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

Fields = Mapping[str, Any]
Sums = dict[str, tuple[float, float]]
"""For each metric its total and its weight: the metric is the quotient of the sums."""
Scorer = Callable[[Iterable[Fields]], Sums]

REQUIRED = ("records", "model", "collate", "loss")
_FIELD = "params.yaml: workload.module"


class Workload:
    """A checked workload module. What its functions raise comes out as UserCode explains it, and
    what they give is looked at before it is used.

    records(source), model(**params), collate(records), loss(output, target) are required;
    ingest(destination, **params), metrics(output, target), baselines(train),
    predict(model, rows), example, and for models that are split
    tp_plan(model, degree, **options) and pp_split(model, num_stages) are optional.
    """

    def __init__(self, module: ModuleType, detail: Path) -> None:
        self.module = module
        self._code = UserCode(module.__name__, module.__file__, detail)

    @property
    def has_ingest(self) -> bool:
        return hasattr(self.module, "ingest")

    @property
    def has_predict(self) -> bool:
        return hasattr(self.module, "predict")

    def ingest(self, destination: Path, params: Mapping[str, Any]) -> None:
        """Have the user's ingest() write raw input files into the directory."""
        with self._code.running("ingest()"):
            self.module.ingest(destination, **params)

    def records(self, source: Path) -> Iterator[Record]:
        number = 0
        try:
            for record in self.module.records(source):
                yield record
                number += 1
        except Exception as error:
            when = f", after {number} records,"
            raise self._code.explain(error, "records()", when) from None

    def model(self, params: Mapping[str, Any]) -> "nn.Module":
        from torch import nn

        with self._code.running("model()"):
            model = self.module.model(**params)
        if not isinstance(model, nn.Module):
            raise self._wrong("model()", model, "return a torch.nn.Module")
        return model

    def collate(self, records: Sequence[Fields]) -> "tuple[Tensor, Tensor]":
        with self._code.running("collate()"):
            batch = self.module.collate(Records.of(records))
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise self._wrong("collate()", batch, "return a pair of tensors: (input, target)")
        inputs, target = batch
        return inputs, target

    def forward(self, model: "nn.Module", inputs: "Tensor") -> "Tensor":
        """What the user's model answers to a batch."""
        with self._code.running("model(): its forward()"):
            output: Tensor = model(inputs)
        return output

    def loss(self, output: "Tensor", target: "Tensor") -> "Tensor":
        from torch import Tensor

        try:  # and not running(): this is part of every step
            loss = self.module.loss(output, target)
        except Exception as error:
            raise self._code.explain(error, "loss()") from None
        remedy = "return a tensor of one number, the batch's mean"
        if not isinstance(loss, Tensor):
            raise self._wrong("loss()", loss, remedy)
        if loss.ndim:
            shape = tuple(loss.shape)
            raise WorkloadError(
                f"{self.module.__name__}.loss() gave a tensor of shape {shape}: {remedy}"
            )
        return loss

    def metrics(self, output: "Tensor", target: "Tensor") -> Sums:
        """The user's metrics, or the mean loss weighted by samples."""
        if not hasattr(self.module, "metrics"):
            num_samples = float(len(target))
            return {"loss": (self.loss(output, target).item() * num_samples, num_samples)}
        with self._code.running("metrics()"):
            sums = self.module.metrics(output, target)
        return self._checked_sums("metrics()", sums)

    def baselines(self, train: Iterable[Fields]) -> dict[str, Scorer]:
        """Simple predictors fitted to the training records, by name; none without the function."""
        if not hasattr(self.module, "baselines"):
            return {}
        with self._code.running("baselines()"):
            scorers = self.module.baselines(train)
        if not isinstance(scorers, dict):
            raise self._wrong("baselines()", scorers, "return a scorer for each name, as a dict")
        return {name: self._as_scorer(name, scorer) for name, scorer in scorers.items()}

    def tp_plan(
        self, model: "nn.Module", degree: int, options: Mapping[str, bool]
    ) -> "dict[str, ParallelStyle]":
        """The user's way of splitting each layer: a style of torch for each submodule's name.

        Raises WorkloadError in the function's own words when it says ValueError: it sees a model
        and no record.
        """
        from torch.distributed.tensor.parallel import ParallelStyle

        remedy = "return a ParallelStyle of torch for each submodule's name, as a dict"
        plan = self._split("tp_plan", model, degree, options)
        if not isinstance(plan, dict) or not plan:
            raise self._wrong("tp_plan()", plan, remedy)
        for style in plan.values():
            if not isinstance(style, ParallelStyle):
                raise self._wrong("tp_plan()", style, remedy)
        return plan

    def pp_split(self, model: "nn.Module", num_stages: int) -> "list[nn.Module]":
        """The user's stages of a model, the first to the last. Raises as tp_plan() does."""
        from torch import nn

        remedy = f"return {num_stages} modules, the stages from the first to the last, as a list"
        stages = self._split("pp_split", model, num_stages, {})
        if not isinstance(stages, list) or len(stages) != num_stages:
            raise self._wrong("pp_split()", stages, remedy)
        for stage in stages:
            if not isinstance(stage, nn.Module):
                raise self._wrong("pp_split()", stage, remedy)
        return stages

    def _split(
        self, function: str, model: "nn.Module", degree: int, options: Mapping[str, bool]
    ) -> Any:
        with self._code.running(f"{function}()"):
            try:
                return getattr(self.module, function)(model, degree, **options)
            except ValueError as error:
                raise WorkloadError(f"{self.module.__name__}.{function}(): {error}") from error

    def predict(self, model: "nn.Module", rows: list[dict[str, Any]]) -> list[Any]:
        """The user's answers to rows, or the model's raw output."""
        import torch

        with torch.inference_mode():
            if self.has_predict:
                with self._code.running("predict()"):
                    return list(self.module.predict(model, rows))
            inputs, _ = self.collate(rows)
            return list(self.forward(model, inputs).tolist())

    @property
    def example(self) -> list[dict[str, Any]] | None:
        """Rows that the registered model answers."""
        return getattr(self.module, "example", None)

    def _as_scorer(self, name: str, scorer: Scorer) -> Scorer:
        function = f"baselines()['{name}']"

        def score(rows: Iterable[Fields]) -> Sums:
            with self._code.running(function):
                sums = scorer(rows)
            return self._checked_sums(function, sums)

        return score

    def _checked_sums(self, function: str, sums: Any) -> Sums:
        try:
            return {str(k): (float(total), float(weight)) for k, (total, weight) in sums.items()}
        except (AttributeError, TypeError, ValueError):
            remedy = "return {name: (total, weight)}, two numbers for each metric"
            raise self._wrong(function, sums, remedy) from None

    def _wrong(self, function: str, found: Any, remedy: str) -> WorkloadError:
        return WorkloadError(
            f"{self.module.__name__}.{function} gave a {type(found).__name__}: {remedy}"
        )


def load_workload(name: str, root: Path, detail: Path | None = None) -> Workload:
    """Import and check the workload module, with `root` (the workspace) on sys.path.

    detail: the file for what its exceptions say; by default one in the workspace's state.
    Raises WorkloadError naming params.yaml's field, the module and the remedy.
    """
    module = _import(name, root)
    _check_origin(module, root)
    missing = [function for function in REQUIRED if not callable(getattr(module, function, None))]
    if missing:
        raise WorkloadError(
            f"{_FIELD}: {module.__file__} lacks {', '.join(f'{f}()' for f in missing)}; "
            f"a workload has {', '.join(f'{f}()' for f in REQUIRED)}"
        )
    example = getattr(module, "example", None)
    if example is not None and not (
        isinstance(example, list) and example and all(isinstance(row, dict) for row in example)
    ):
        raise WorkloadError(
            f"{_FIELD}: {module.__file__}: `example` must be a list of rows, each a dict of named "
            "values as predict() takes them"
        )
    return Workload(module, detail or root / ".convoy" / "logs" / "user-error.txt")


def _import(name: str, root: Path) -> ModuleType:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise WorkloadError(
                f"{_FIELD}: there is no module '{name}' under {root}; "
                f"write {name.replace('.', '/')}.py or correct the name"
            ) from None
        raise WorkloadError(
            f"{_FIELD}: importing '{name}' failed: it needs '{error.name}', "
            "which is not installed; install it or remove the import"
        ) from None
    except SyntaxError as error:
        place = f"{Path(error.filename or name).name}:{error.lineno}"
        raise WorkloadError(
            f"{_FIELD}: importing '{name}' failed: {place}: {type(error).__name__}: {error.msg}"
        ) from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = f": {error}" if isinstance(error, ImportError) else ""
        raise WorkloadError(
            f"{_FIELD}: importing '{name}' failed: {type(error).__name__} at "
            f"{Path(frame.filename).name}:{frame.lineno}{what}; run it by itself to see more: "
            f"python -c 'import {name}'"
        ) from None


def _check_origin(module: ModuleType, root: Path) -> None:
    """Raise WorkloadError for another module of that name: one that was imported before, such as
    Convoy's `data` or that of another workspace in the same process."""
    path = root.joinpath(*module.__name__.split("."))
    own = [p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()]
    if own and module.__file__ and not own[0].samefile(module.__file__):
        raise WorkloadError(
            f"{_FIELD}: '{module.__name__}' is {own[0]}, but in this process another module has "
            f"that name: {module.__file__}; rename yours, or use a process for each workspace"
        )


def check_params(
    workload: Workload, function: str, params: Mapping[str, Any], field: str, num_before: int = 0
) -> None:
    """Raise WorkloadError for a name in params.yaml's `field` that the workload's function does
    not take; `num_before` arguments come before the named ones."""
    signature = inspect.signature(getattr(workload.module, function))
    try:
        signature.bind(*(None for _ in range(num_before)), **params)
    except TypeError as error:
        raise WorkloadError(
            f"params.yaml: {field}: {error}; {workload.module.__name__}.{function}{signature}"
        ) from None
