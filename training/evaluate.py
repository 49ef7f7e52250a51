"""Metrics on held-out records, whole and for each jurisdiction, beside the baselines."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from data.residency import Exclusion
from data.shard import Shard
from data.transfer import SealedShards
from training.config import EvaluateConfig
from training.errors import TrainingError, WorkloadError
from training.workload import Sums, Workload

if TYPE_CHECKING:
    from torch import nn

Rows = list[dict[str, Any]]


class Score(BaseModel, frozen=True, extra="forbid"):
    """Metrics by name: the model's, and each baseline's."""

    model: dict[str, float]
    baselines: dict[str, dict[str, float]]


class Metrics(BaseModel, frozen=True, extra="forbid"):
    """What the model is worth on the held-out records that the site may read."""

    primary: str
    goal: Literal["minimize", "maximize"]
    overall: Score
    by_jurisdiction: dict[str, Score]
    num_records: dict[str, int]
    """Held-out records by jurisdiction."""
    excluded: tuple[Exclusion, ...]
    """Held-out records that the site may not read."""

    @property
    def primary_value(self) -> float:
        return self.overall.model[self.primary]


def evaluate(
    workload: Workload,
    weights: Path,
    model_params: dict[str, Any],
    sealed: SealedShards,
    train: Sequence[Shard],
    holdout: Sequence[Shard],
    excluded: tuple[Exclusion, ...],
    config: EvaluateConfig,
    on_shard: Callable[[Shard], None] = lambda shard: None,
) -> Metrics:
    """Score the model and the workload's baselines on every held-out record exactly once.

    A shard holds one jurisdiction, so scoring it alone gives that jurisdiction's part of the sums.
    Raises TrainingError when there is nothing to score or no such metric as `config.primary`.
    """
    if not holdout:
        raise TrainingError(
            "no held-out record may be read at the training site: raise params.yaml: "
            "shard.holdout, ingest more records, or allow more in residency.rules"
        )
    model = load_weights(workload, weights, model_params)
    baselines = workload.baselines(row for shard in train for row in sealed.open(shard))
    sums: dict[str, dict[str, Sums]] = defaultdict(dict)
    num_records: dict[str, int] = defaultdict(int)
    for shard in holdout:
        rows = list(sealed.open(shard))
        scores = sums[shard.jurisdiction]
        _add(scores, "", score_model(workload, model, rows, config.batch))
        for name, scorer in baselines.items():
            _add(scores, name, scorer(rows))
        num_records[shard.jurisdiction] += len(rows)
        on_shard(shard)
    total: dict[str, Sums] = {}
    for scores in sums.values():
        for name, part in scores.items():
            _add(total, name, part)
    overall = _score(total)
    if config.primary not in overall.model:
        raise WorkloadError(
            f"params.yaml: evaluate.primary: there is no metric '{config.primary}'; "
            f"the workload gives {', '.join(sorted(overall.model))}"
        )
    return Metrics(
        primary=config.primary,
        goal=config.goal,
        overall=overall,
        by_jurisdiction={name: _score(part) for name, part in sorted(sums.items())},
        num_records=dict(sorted(num_records.items())),
        excluded=excluded,
    )


def load_weights(workload: Workload, weights: Path, model_params: dict[str, Any]) -> "nn.Module":
    """The trained model, ready to predict."""
    from safetensors.torch import load_model

    model = workload.model(model_params)
    load_model(model, str(weights))
    return model.eval()


def score_model(workload: Workload, model: "nn.Module", rows: Rows, batch: int) -> Sums:
    """Sums of the workload's metrics over these records, in batches of one thread each.

    One thread, since the order of a sum may change with their number.
    """
    import torch

    sums: dict[str, Sums] = {}
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for records in _batches(rows, batch):
                inputs, target = workload.collate(records)
                _add(sums, "", workload.metrics(model(inputs), target))
    finally:
        torch.set_num_threads(num_threads)
    return sums[""]


def _batches(rows: Iterable[dict[str, Any]], size: int) -> Iterator[Rows]:
    iterator = iter(rows)
    while batch := list(islice(iterator, size)):
        yield batch


def _add(sums: dict[str, Sums], name: str, part: Sums) -> None:
    mine = sums.setdefault(name, {})
    for metric, (total, weight) in part.items():
        old_total, old_weight = mine.get(metric, (0.0, 0.0))
        mine[metric] = (old_total + float(total), old_weight + float(weight))


def _score(sums: dict[str, Sums]) -> Score:
    quotients = {
        name: {metric: total / weight for metric, (total, weight) in part.items() if weight}
        for name, part in sums.items()
    }
    return Score(model=quotients.pop("", {}), baselines=quotients)
