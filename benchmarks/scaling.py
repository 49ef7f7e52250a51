"""Speed-up from one worker to two, and what a worker holds when four share the model.

Ours is what the trainer calls in a step: parallelize(), forward_backward(), Gradients, take_step().
The reference is a bare loop with torch's DDP around the same model, with the same optimiser. They
take turns, each in processes of its own; one core and one thread a worker, data in memory. Strong:
the global batch stays the same. Weak: each worker's batch does.
"""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, publish
from benchmarks.turns import Steps, take_turns
from tests.training.ranks import run_ranks
from tests.workspaces import ROOT
from training.config import TrainConfig

ROUNDS, BLOCK_STEPS = 15, 2
BATCH, LENGTH = 8, 64
MODEL = {"max_length": LENGTH, "width": 256, "num_heads": 8, "num_layers": 8}  # 6.6 M parameters
SPEEDUP_RATIO = 0.98
SHARE_TOLERANCE = 0.1
SHARDS = 4


def configure(batch: int, **dims: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "region": "eu",
            "steps": 1,
            "global_batch": batch,
            "model": MODEL,
            "dims": {"dp_replicate": 1} | dims,
        }
    )


def pin() -> None:
    """A core for each rank of this machine."""
    import torch.distributed as dist

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})


def make_batch(config: TrainConfig) -> tuple[Any, Any]:
    import torch
    import torch.distributed as dist

    size = config.global_batch // dist.get_world_size()
    tokens = torch.randint(1, 256, (size, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def build_ours(config: TrainConfig, directory: Path) -> Steps:
    from training.allocator import keep_freed_memory
    from training.optimization import Gradients, build_optimizers, take_step
    from training.parallel import build_mesh, choose_device, parallelize
    from training.timing import StepTimer
    from training.workload import load_workload

    pin()
    keep_freed_memory()  # as training/worker.py does
    inputs, target = make_batch(config)
    workload = load_workload("examples.place_names", ROOT)
    mesh = build_mesh(config.dims, choose_device())
    model = parallelize(workload, workload.model(config.model), config, mesh)
    optimizers = build_optimizers(model.parts, config.optimizer)
    gradients = Gradients(model.parts, model.stages)
    timer = StepTimer()

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            model.forward_backward(inputs, target, timer)
            gradients.clip(config.optimizer.grad_clip)
            take_step(optimizers, config.optimizer.lr)
            gradients.forget()
            timer.take()

    return take


def build_bare(config: TrainConfig, directory: Path) -> Steps:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grad_norm_

    from examples import place_names

    pin()
    inputs, target = make_batch(config)
    model = place_names.model(**config.model)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0, fused=True
    )

    def take(num_steps: int) -> None:
        for _ in range(num_steps):
            place_names.loss(model(inputs), target).backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), settings.grad_clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return take


def count_held_bytes(config: TrainConfig) -> dict[str, int]:
    """In each rank, after a step and before its gradients are forgotten: bytes by their kind."""
    import torch

    from training.optimization import build_optimizers
    from training.parallel import build_mesh, choose_device, parallelize
    from training.timing import StepTimer
    from training.workload import load_workload

    workload = load_workload("examples.place_names", ROOT)
    mesh = build_mesh(config.dims, choose_device())
    model = parallelize(workload, workload.model(config.model), config, mesh)
    optimizers = build_optimizers(model.parts, config.optimizer)
    tokens = torch.randint(1, 256, (config.global_batch // config.dims.num_replicas, LENGTH))
    model.forward_backward(tokens, tokens, StepTimer())
    for optimizer in optimizers:
        optimizer.step()
    parameters = [parameter for part in model.parts for parameter in part.parameters()]
    moments = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim  # not the count of steps
    ]
    return {
        "parameters": _count_bytes(parameters),
        "gradients": _count_bytes([p.grad for p in parameters if p.grad is not None]),
        "optimiser": _count_bytes(moments),
    }


def _count_bytes(tensors: Iterable[Any]) -> int:
    """What this rank really keeps; a buffer that several tensors are views of counts once."""
    from torch.distributed.tensor import DTensor

    kept = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = [tensor.untyped_storage() for tensor in kept]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def time_steps(world_size: int, config: TrainConfig) -> tuple[float, float]:
    """Median seconds of our step and of the bare loop's."""
    builders = {"ours": partial(build_ours, config), "bare": partial(build_bare, config)}
    seconds = take_turns(builders, world_size, ROUNDS, BLOCK_STEPS)
    return median(seconds["ours"]), median(seconds["bare"])


def measure_speedups() -> list[Row]:
    alone = time_steps(1, configure(BATCH))
    rows = []
    for case, batch, work in (("strong", BATCH, 1), ("weak", 2 * BATCH, 2)):
        together = time_steps(2, configure(batch, dp_replicate=2))
        ours, bare = (work * one / two for one, two in zip(alone, together, strict=True))
        rows.append(
            Row(
                case=f"{case}: speed-up from 1 to 2 workers",
                ours=ours,
                reference=bare,
                ratio=ours / bare,
                target=f"ratio >= {SPEEDUP_RATIO}",
                holds=ours / bare >= SPEEDUP_RATIO,
            )
        )
    return rows


def measure_shares() -> list[Row]:
    [whole] = run_ranks(1, count_held_bytes, configure(BATCH))
    ranks = run_ranks(SHARDS, count_held_bytes, configure(BATCH, dp_shard=SHARDS))
    rows = []
    for kind, num_bytes in whole.items():
        held, quarter = max(rank[kind] for rank in ranks) / 1e6, num_bytes / SHARDS / 1e6
        rows.append(
            Row(
                case=f"FSDP on {SHARDS}: {kind} of the worker that holds most",
                ours=held,
                reference=quarter,
                ratio=held / quarter,
                target=f"ratio <= {1 + SHARE_TOLERANCE}",
                holds=held / quarter <= 1 + SHARE_TOLERANCE,
            )
        )
    return rows


def main() -> None:
    publish("scaling", "times as fast", measure_speedups())
    publish("shares", "MB", measure_shares())


if __name__ == "__main__":
    main()
