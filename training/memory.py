"""Memory: what there is, whether a training fits into it, and what would fit."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training.config import TrainConfig
from training.errors import MemoryTooSmall
from training.memory_need import MemoryNeed

if TYPE_CHECKING:
    import torch


ADVICE = (
    "a smaller train.global_batch, a larger train.accumulate, "
    "train.activation_checkpointing: full, or train.dims.dp_shard over more workers"
)
_LESS = "; train.activation_checkpointing: full needs less"
_CGROUP = Path("/sys/fs/cgroup")
_ALLOCATOR = "can't allocate memory"


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


def check_memory(need: MemoryNeed, config: TrainConfig, free_bytes: int, sharing: int) -> None:
    """Raise MemoryTooSmall when the workers need more than there is.

    free_bytes: while the parameters are there already. sharing: how many workers share it.
    """
    missing = need.total - need.parameters
    if missing * sharing <= free_bytes:
        return
    there = free_bytes // sharing + need.parameters
    copies = f", copies {_size(need.copies)}" if need.copies else ""
    raise MemoryTooSmall(
        f"params.yaml: train: each of {sharing} workers on this machine needs about "
        f"{_size(need.total)} of memory (parameters {_size(need.parameters)}, gradients "
        f"{_size(need.gradients)}, optimiser {_size(need.optimizer)}{copies}, activations of "
        f"{need.samples} samples {_size(need.activations)}), and there is {_size(there)} for each. "
        + _say_what_fits(need, config, there)
    )


def _say_what_fits(need: MemoryNeed, config: TrainConfig, there: int) -> str:
    fitting = (there - need.state) * need.samples // max(1, need.activations)
    if fitting >= 1:
        return f"What would fit: {_say_passes(need, config, fitting)}"
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


def _say_passes(need: MemoryNeed, config: TrainConfig, fitting: int) -> str:
    """How fewer samples go through the model at once."""
    replicas = config.dims.num_replicas
    batch = config.global_batch // replicas
    if config.reproducible:
        virtual = 1 << math.ceil(math.log2(config.global_batch / fitting))
        return f"train.virtual_ranks: {virtual}"
    if config.dims.pp > 1 and config.pipeline.schedule == "gpipe":
        return "train.pipeline.schedule: 1f1b, which has fewer samples under way, or fewer of them"
    if config.dims.pp > 1:
        under_way = need.samples * config.pipeline.microbatches // batch
        parts = math.ceil(batch * under_way / fitting)
        return f"the same batch in train.pipeline.microbatches: {parts} or more"
    whole = fitting * config.accumulate * replicas
    passes = math.ceil(batch / fitting)
    more = "" if config.activation_checkpointing == "full" else _LESS
    return (
        f"train.global_batch: {whole}, or the same batch in train.accumulate: {passes} passes{more}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"


def _read_text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def count_local_workers() -> int:
    """Workers on this machine, by what torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
