"""The model's metrics on held-out shards, by one process or by many with the same result.

Batches are numbered through all shards, and a rank scores a run of consecutive ones. Each is scored
whole and by one rank, as a single process would score it, and its sums are kept apart until they
are added in the order of shards and batches: so the result is a single process's to the bit,
whatever the number of ranks. An all-reduce of the ranks' sums would add them in another order.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data.record import Records
from data.sealed_shards import SealedShards
from data.shard import OpenShard, Shard
from storage.buffers import Memory
from training.errors import TrainingError
from training.spec import EvaluationSpec
from training.supervisor import run_workers
from training.workload import Sums, Workload

if TYPE_CHECKING:
    from torch import nn

Rows = Sequence[dict[str, Any]]

_SCORES_FILE = "scores.json"


class Batch(NamedTuple):
    """Consecutive records of one shard."""

    shard: int
    start: int
    stop: int


def load_weights(workload: Workload, weights: Path, model_params: dict[str, Any]) -> "nn.Module":
    """The trained model, ready to predict. Raises TrainingError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    model = workload.model(model_params)
    try:
        load_model(model, str(weights))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise TrainingError(
            f"{weights} does not fit the workload's model or was changed "
            f"({type(error).__name__}): run `convoy stage train`"
        ) from error
    return model.eval()


def score_model(workload: Workload, model: "nn.Module", rows: Rows, batch: int) -> Sums:
    """Sums of the workload's metrics over these records, in batches of one thread each.

    One thread, since the order of a sum may change with their number.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        records = Records.of(rows)
        starts = range(0, len(records), batch)
        return add_up(score_batch(workload, model, records[s : s + batch]) for s in starts)
    finally:
        torch.set_num_threads(num_threads)


def score_batch(workload: Workload, model: "nn.Module", rows: Rows) -> Sums:
    """Sums of the workload's metrics over one batch."""
    import torch

    with torch.inference_mode():
        inputs, target = workload.collate(rows)
        return workload.metrics(workload.forward(model, inputs), target)


def add_up(parts: Iterable[Sums]) -> Sums:
    """Totals and weights of these sums, added in their order."""
    sums: Sums = {}
    for part in parts:
        for metric, (total, weight) in part.items():
            old_total, old_weight = sums.get(metric, (0.0, 0.0))
            sums[metric] = (old_total + float(total), old_weight + float(weight))
    return sums


def score_by_workers(spec: EvaluationSpec, on_progress: Callable[[int], None]) -> list[Sums]:
    """The model's sums on each shard, measured by workers under torchrun.

    `on_progress` gets how many shards' worth of batches are done. Raises WorkersFailed with the
    first failing rank's own error.
    """
    run_workers(spec, lambda line: on_progress(int(line["step"])))
    scores: list[list[Sums]] = json.loads((spec.run_directory / _SCORES_FILE).read_bytes())
    return [add_up(parts) for parts in scores]


def score_part(spec: EvaluationSpec, workload: Workload) -> None:
    """Score this rank's batches; rank 0 gathers and writes the sums of all. In a process group."""
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sealed, shards = spec.open_shards()
    model = load_weights(workload, spec.weights, spec.model)
    batches = split_batches([shard.num_records for shard in shards], spec.batch)
    mine = batches[len(batches) * rank // num_ranks : len(batches) * (rank + 1) // num_ranks]
    turns = mine
    if spec.sharded:
        _shard_parameters(model)
        # Every pass gathers the parameters from all ranks: those with a batch less pass one whose
        # sums are not used.
        turns = mine + [batches[0]] * (-(-len(batches) // num_ranks) - len(mine))
    sums = []
    for done, rows in enumerate(_open_batches(sealed, shards, turns), 1):
        sums.append(score_batch(workload, model, rows))
        if rank == 0:
            _report(spec.run_directory / spec.progress_file, len(shards) * done // len(turns))
    parts: list[list[Sums]] = [[] for _ in range(num_ranks)]
    dist.gather_object(sums[: len(mine)], parts if rank == 0 else None)
    if rank == 0:
        scores: list[list[Sums]] = [[] for _ in shards]
        for batch, measured in zip(batches, chain.from_iterable(parts), strict=True):
            scores[batch.shard].append(measured)
        (spec.run_directory / _SCORES_FILE).write_text(json.dumps(scores))


def split_batches(num_records: Sequence[int], size: int) -> list[Batch]:
    """Every record of shards of these sizes once, in order; no batch spans two shards."""
    return [
        Batch(shard, start, min(start + size, count))
        for shard, count in enumerate(num_records)
        for start in range(0, count, size)
    ]


def _open_batches(
    sealed: SealedShards, shards: Sequence[Shard], batches: Sequence[Batch]
) -> Iterator[Records]:
    import numpy as np

    memory = Memory(max(shard.num_bytes for shard in shards), 2)
    opened: tuple[int, OpenShard] | None = None
    for batch in batches:
        if opened is None or opened[0] != batch.shard:
            opened = (batch.shard, sealed.open(shards[batch.shard], memory))
        yield opened[1].take(np.arange(batch.start, batch.stop))


def _report(path: Path, num_shards: int) -> None:
    with path.open("a") as file:
        file.write(json.dumps({"step": num_shards}) + "\n")


def _shard_parameters(model: "nn.Module") -> None:
    """Have each rank keep a part of every parameter, whatever the degrees in training were.

    Without gradients this needs no plan of the workload, and a pass computes what it would on
    whole parameters, to the bit; tensor parallelism would add in another order.
    """
    from torch.distributed.fsdp import fully_shard

    inner_first = reversed(list(model.modules()))
    for module in inner_first:
        if module is model or any(True for _ in module.parameters(recurse=False)):
            fully_shard(module)
