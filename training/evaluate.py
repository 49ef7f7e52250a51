"""Metrics on held-out records, whole and for each jurisdiction, beside the baselines."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from data.residency import Exclusion
from data.sealed_shards import SealedShards
from data.shard import Shard
from training.config import EvaluateConfig
from training.errors import TrainingError, WorkloadError
from training.scoring import Rows, add_up, load_weights, score_model
from training.workload import Sums, Workload

if TYPE_CHECKING:
    from torch import nn


class Score(BaseModel, frozen=True, extra="forbid"):
    """Metrics by name: the model's, and each baseline's."""

    model: dict[str, float]
    baselines: dict[str, dict[str, float]]


class Metrics(BaseModel, frozen=True, extra="forbid"):
    """What the model is worth on the held-out records that the site may read."""

    fingerprint: str
    """Of the training run whose model was scored."""
    primary: str
    goal: Literal["minimize", "maximize"]
    overall: Score
    by_jurisdiction: dict[str, Score]
    num_records: dict[str, int]
    """Held-out records by jurisdiction."""
    excluded: tuple[Exclusion, ...]
    """Held-out records that the site may not read."""
    training_loss: float | None = None
    """Mean over the last tenth of the logged steps, three at least, to set beside the loss of
    held-out records."""

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
    fingerprint: str,
    measured: Sequence[Sums] | None = None,
    on_shard: Callable[[Shard], None] = lambda shard: None,
) -> Metrics:
    """Score the model and the workload's baselines on every held-out record exactly once.

    measured: the model's sums on each shard, where workers have measured them; else it is scored
    here. A shard holds one jurisdiction, so scoring it alone gives that jurisdiction's part of the
    sums. Raises WorkloadError when there is no such metric as `config.primary`, TrainingError when
    a metric is not finite.
    """
    if measured is None:
        model = load_weights(workload, weights, model_params)
    baselines = workload.baselines(row for shard in train for row in sealed.open(shard))
    sums: dict[str, dict[str, Sums]] = defaultdict(dict)
    num_records: dict[str, int] = defaultdict(int)
    for number, shard in enumerate(holdout):
        rows = sealed.open(shard).records() if baselines or measured is None else []
        scores = sums[shard.jurisdiction]
        if measured is None:
            part = score_model(workload, model, rows, config.batch)
        else:
            part = measured[number]
        check_primary(part, config.primary)
        _add(scores, "", part)
        for name, scorer in baselines.items():
            _add(scores, name, scorer(rows))
        num_records[shard.jurisdiction] += shard.num_records
        on_shard(shard)
    total: dict[str, Sums] = {}
    for scores in sums.values():
        for name, part in scores.items():
            _add(total, name, part)
    overall = _score(total, "all held-out records")
    if config.primary not in overall.model:
        raise TrainingError(
            f"params.yaml: evaluate.primary: the held-out records say nothing of {config.primary} "
            "(its weights are 0): hold out more of them by shard.holdout, or name another metric"
        )
    return Metrics(
        fingerprint=fingerprint,
        primary=config.primary,
        goal=config.goal,
        overall=overall,
        by_jurisdiction={name: _score(part, name) for name, part in sorted(sums.items())},
        num_records=dict(sorted(num_records.items())),
        excluded=excluded,
    )


def check_primary(sums: Sums, primary: str) -> None:
    """Raise WorkloadError unless the metric that decides is among these."""
    if primary not in sums:
        raise WorkloadError(
            f"params.yaml: evaluate.primary: there is no metric '{primary}'; "
            f"the workload gives {', '.join(sorted(sums))}"
        )


def rehearse(workload: Workload, model: "nn.Module", rows: Rows, primary: str) -> None:
    """Let an untrained model be scored on a few records and answer the workload's example, so that
    what evaluate or register would stumble over is found before training is spent.
    """
    model.eval()
    check_primary(score_model(workload, model, rows, len(rows)), primary)
    if workload.example:
        workload.predict(model, workload.example)
    model.train()


def _add(sums: dict[str, Sums], name: str, part: Sums) -> None:
    sums[name] = add_up((sums.get(name, {}), part))


def _score(sums: dict[str, Sums], whose: str) -> Score:
    quotients = {
        name: {metric: total / weight for metric, (total, weight) in part.items() if weight}
        for name, part in sums.items()
    }
    for name, values in quotients.items():
        for metric, value in values.items():
            if not math.isfinite(value):
                what = f"baseline '{name}'" if name else "the model"
                raise TrainingError(
                    f"metric {metric} of {what} on {whose} is {value}: a metric must be a finite "
                    "number, or it cannot be compared; mend the workload's metrics or the training"
                )
    return Score(model=quotients.pop("", {}), baselines=quotients)
