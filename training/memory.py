"""Memory: what a training needs in each worker, what there is, and what would fit.

The need is counted before the first step: parameters as this rank holds them, as much again for
gradients, what the optimiser keeps beside them, the buckets that DDP averages, and what one sample
leaves for backward, measured on a rehearsal and scaled to the batch. Allocators and libraries take
some more.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import TrainConfig
from training.errors import MemoryTooSmall

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from training.workload import Workload

ADVICE = (
    "a smaller train.global_batch, a larger train.accumulate, "
    "train.activation_checkpointing: full, or train.dims.dp_shard over more workers"
)
_CGROUP = Path("/sys/fs/cgroup")
_ALLOCATOR = "can't allocate memory"


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one worker at their highest."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of the samples of one pass."""
    samples: int
    """In one pass of this worker."""

    @property
    def state(self) -> int:
        """What a smaller batch does not make smaller."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.state + self.activations


def read_free_bytes(device: "torch.device") -> int:
    """What processes can still take: of this worker's GPU, or of this machine or its container."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) << 10
    limit = _read_text(_CGROUP / "memory.max").strip()
    if limit.isdigit():
        free = min(free, int(limit) - int(_read_text(_CGROUP / "memory.current")))
    return free


def count_oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the kernel has ended for want of memory since this machine started."""
    counts = dict(line.split() for line in _read_text(vmstat).splitlines())
    return int(counts.get("oom_kill", 0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation that failed is behind the error."""
    return any(
        isinstance(one, MemoryError)
        or type(one).__name__ == "OutOfMemoryError"
        or (isinstance(one, RuntimeError) and _ALLOCATOR in str(one))
        for one in walk_causes(error)
    )


def walk_causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it came out of."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def measure_sample_bytes(
    workload: "Workload", model: "nn.Module", inputs: "Tensor", target: "Tensor"
) -> int:
    """Bytes that a forward pass keeps for backward, of one sample. The model stays as it is."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: "Tensor") -> "Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = [buffer.clone() for buffer in model.buffers()]
    with saved_tensors_hooks(note, lambda tensor: tensor):
        workload.loss(model(inputs), target)  # holds what it kept until it is counted
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return math.ceil(sum(kept.values()) / len(target))


def count_need(parts: Sequence["nn.Module"], config: TrainConfig, sample_bytes: int) -> MemoryNeed:
    """What this worker will hold. parts: as the worker holds them, sharded or not."""
    from torch.distributed.tensor import DTensor

    held = [p.to_local() if isinstance(p, DTensor) else p for q in parts for p in q.parameters()]
    parameters = sum(p.nbytes for p in held)
    copies = {"adamw": 2, "sgd": 1 if config.optimizer.momentum else 0}[config.optimizer.name]
    dims = config.dims
    buckets = parameters if dims.world_size == dims.dp_replicate > 1 else 0
    samples = config.global_batch // dims.num_replicas
    return MemoryNeed(
        parameters=parameters,
        gradients=parameters + buckets,
        optimizer=copies * parameters,
        activations=samples * sample_bytes,
        samples=samples,
    )


def check_memory(need: MemoryNeed, config: TrainConfig, free_bytes: int, sharing: int) -> None:
    """Raise MemoryTooSmall when the workers need more than there is.

    free_bytes: while the parameters are there already. sharing: how many workers share it.
    """
    missing = need.total - need.parameters
    if missing * sharing <= free_bytes:
        return
    there = free_bytes // sharing + need.parameters
    raise MemoryTooSmall(
        f"params.yaml: train: each of {sharing} workers on this machine needs about "
        f"{_size(need.total)} of memory (parameters {_size(need.parameters)}, gradients "
        f"{_size(need.gradients)}, optimiser {_size(need.optimizer)}, activations of "
        f"{need.samples} samples {_size(need.activations)}), and there is {_size(there)} for each. "
        + _say_what_fits(need, config, there)
    )


def _say_what_fits(need: MemoryNeed, config: TrainConfig, there: int) -> str:
    replicas = config.dims.num_replicas
    fitting = (there - need.state) * need.samples // max(1, need.activations)
    if fitting >= 1:
        passes = math.ceil(need.samples / fitting)
        return (
            f"What would fit: train.global_batch: {fitting * replicas}, or the same batch in "
            f"train.accumulate: {passes} passes; train.activation_checkpointing: full needs less"
        )
    of_one = math.ceil(need.activations / max(1, need.samples))
    if there > of_one:
        ways = math.ceil(need.state / (there - of_one)) * config.dims.dp_shard
        return (
            "A smaller batch is not enough. What would fit: the parameters sharded over at least "
            f"{ways} workers with so much memory each, train.dims.dp_shard: {ways}"
        )
    return (
        f"One sample's activations are {_size(of_one)}: take train.activation_checkpointing: full, "
        "shorter samples, a smaller model or a larger machine"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def count_local_workers() -> int:
    """Workers on this machine, by what torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
