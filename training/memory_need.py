"""What one worker of a training will hold in memory, counted before its first step.

Parameters as this rank holds them, as much again for gradients, what the optimiser keeps beside
them, the buckets that DDP averages, copies that a way to synchronise keeps, and what one sample
leaves for backward, measured on a rehearsal and scaled to the samples that are under way at once.
Allocators and libraries take some more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from training.config import TrainConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from training.workload import Workload


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one worker at their highest."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of these samples."""
    samples: int
    """Of this worker, that have gone forward and not yet backward."""
    copies: int = 0
    """Of parameters and more, that keeping workers together takes."""

    @property
    def state(self) -> int:
        """What a smaller batch does not make smaller."""
        return self.parameters + self.gradients + self.optimizer + self.copies

    @property
    def total(self) -> int:
        return self.state + self.activations


def measure_sample_bytes(
    workload: "Workload",
    model: "nn.Module",
    inputs: "Tensor",
    target: "Tensor",
    checkpointed: Sequence["nn.Module"] = (),
) -> int:
    """Bytes that a forward pass keeps for backward, of one sample. The model stays as it is.

    checkpointed: layers of which the input alone will be kept, and the rest of one at a time.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int | None, dict[int, int]] = {None: {}}
    within: list[int | None] = [None]

    def note(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept.setdefault(within[-1], {})[storage.data_ptr()] = storage.nbytes()
        return tensor

    def enter(number: int, layer: "nn.Module", given: tuple["Tensor", ...]) -> None:
        for tensor in filter(torch.is_tensor, given):
            note(tensor)
        within.append(number)

    def leave(*_: object) -> None:
        within.pop()

    handles = []
    for number, layer in enumerate(checkpointed):
        handles.append(layer.register_forward_pre_hook(partial(enter, number)))
        handles.append(layer.register_forward_hook(leave))
    buffers = [buffer.clone() for buffer in model.buffers()]
    with saved_tensors_hooks(note, lambda tensor: tensor):
        workload.loss(model(inputs), target)  # holds what it kept until it is counted
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    outside = kept.pop(None)
    inside = [sum(v for k, v in layer.items() if k not in outside) for layer in kept.values()]
    return math.ceil((sum(outside.values()) + max(inside, default=0)) / len(target))


def count_need(parts: Sequence["nn.Module"], config: TrainConfig, sample_bytes: int) -> MemoryNeed:
    """What this worker will hold. parts: as the worker holds them, sharded or not. sample_bytes: of
    the undivided model."""
    from torch.distributed.tensor import DTensor

    held = [p.to_local() if isinstance(p, DTensor) else p for q in parts for p in q.parameters()]
    parameters = sum(p.nbytes for p in held)
    states = {"adamw": 2, "sgd": 1 if config.optimizer.momentum else 0}[config.optimizer.name]
    gradients = parameters * _count_gradients(config)
    samples = _count_samples(config)
    return MemoryNeed(
        parameters=parameters,
        gradients=gradients,
        optimizer=states * parameters,
        activations=math.ceil(samples * sample_bytes * _share_of_activations(config)),
        samples=samples,
        copies=_count_copies(config, parameters, gradients, states * parameters),
    )


def _count_gradients(config: TrainConfig) -> int:
    """How many times the parameters' size: the gradients, and what they are averaged in."""
    dims = config.dims
    if config.reproducible:
        # Subtrees of sums, one of each size, and the newest leaf.
        return 1 + (config.virtual_ranks // dims.world_size).bit_length()
    has_buckets = dims.world_size == dims.dp_replicate > 1 and not config.synchronize.is_local
    return 2 if has_buckets else 1


def _count_samples(config: TrainConfig) -> int:
    batch = config.global_batch // config.dims.num_replicas
    if config.reproducible:
        return config.global_batch // config.virtual_ranks
    if config.dims.pp == 1:
        return math.ceil(batch / config.accumulate)
    pipeline, stages = config.pipeline, config.dims.pp
    # Of the first stage, which waits longest for its gradients. Schedules with several stages a
    # worker have more under way, counted in whole passes never twice as many.
    most = {"gpipe": pipeline.microbatches, "1f1b": stages}.get(pipeline.schedule, 2 * stages)
    return batch // pipeline.microbatches * min(pipeline.microbatches, most)


def _share_of_activations(config: TrainConfig) -> float:
    """Of the undivided model's, that is one worker's. Layers are taken to be alike."""
    tp, whole = config.dims.tp, 0.0
    if not config.sequence_parallel:
        # Of a transformer's layer 10 of 34 parts lie between the split matrices (Korthikanti et
        # al., Reducing Activation Recomputation in Large Transformer Models, 2022).
        whole = 10 / 34
    return (whole + (1 - whole) / tp) / config.dims.pp


def _count_copies(config: TrainConfig, parameters: int, gradients: int, optimizer: int) -> int:
    how, others = config.synchronize, config.dims.world_size - 1
    if how.compress == "powersgd":
        return parameters  # what it has left out so far
    if not how.is_local or not others:
        return 0
    # For a checkpoint the worker's own are put aside, and averaged in one piece, while there are no
    # gradients.
    saving = max(0, 2 * (parameters + optimizer) - gradients)
    if how.mode == "diloco":
        outer = parameters * (2 if how.outer_momentum else 1)
        return saving + outer + math.ceil(parameters / how.num_fragments)
    if how.mode == "asynchronous":
        # Rank 0 holds the shared ones, and a message in and out for each other worker.
        return saving + parameters * (3 + 2 * others)
    return saving
