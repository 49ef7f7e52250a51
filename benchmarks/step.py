"""Seconds of a training step: Convoy's loop against a bare one, Lightning Fabric and Accelerate.

All train the same model of place names on the same batches, which are in memory, with the same
optimiser, clipping, schedule and, with two workers, DDP. Each rank runs all four in one process, in
blocks that take turns; the fastest order changes from round to round. A ratio is the median of
those within a round.
"""

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.table import Row, publish
from training.checkpoint_policy import Timetable
from training.config import OptimizerConfig, ParallelDims, TrainConfig
from training.optimization import build_optimizers, clip, learning_rate, take_step
from training.parallel import build_mesh, parallelize
from training.step_log import StepLog
from training.timing import StepTimer
from training.workload import Workload, load_workload

Steps = Callable[[int], None]
"""Takes so many more steps."""

ROOT = Path(__file__).parent.parent
BATCH = 16
"""Samples of a worker."""
LENGTH = 32
BLOCK_STEPS = 20
ROUNDS = 24
LOG_EVERY = 20
GRAD_CLIP = 10.0
OPTIMIZER = OptimizerConfig(lr=0.005, weight_decay=0.1, warmup_steps=150, grad_clip=GRAD_CLIP)
NUM_STEPS = 2000
OURS, BARE = "Convoy", "bare torch"
LIMITS = {BARE: 1.02, "Lightning Fabric": 1.0, "Accelerate": 1.0}


class Data:
    """Batches of one rank, again and again."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(1, 256, (64, BATCH, LENGTH), generator=generator)
        self._batches = [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
        self._number = 0

    def next(self) -> tuple[Tensor, Tensor]:
        self._number += 1
        return self._batches[self._number % len(self._batches)]


def build_ours(workload: Workload, directory: Path) -> Steps:
    """The loop of training/trainer.py, less what reads the data and writes a checkpoint."""
    device, world_size = torch.device("cpu"), dist.get_world_size()
    config = TrainConfig(
        region="eu",
        dims=ParallelDims(dp_replicate=world_size),
        steps=NUM_STEPS,
        global_batch=BATCH * world_size,
        optimizer=OPTIMIZER,
        log_every_steps=LOG_EVERY,
    )
    mesh = build_mesh(config.dims, device)
    model = parallelize(workload, build_model(workload), config, mesh)
    optimizers = build_optimizers(model.parts, config.optimizer)
    timer = StepTimer()
    log = StepLog(directory, 0, timer, device, world_size)
    table = Timetable(config.checkpoint, lambda number: number)
    data, step = Data(dist.get_rank()), 0

    def take(num_steps: int) -> None:
        nonlocal step
        for _ in range(num_steps):
            step += 1
            rate = learning_rate(config.optimizer, step, config.steps)
            with timer.phase("data_wait"):
                inputs, target = data.next()
            loss = model.forward_backward(inputs.to(device), target.to(device), timer)
            with timer.phase("optimizer"):
                norm = clip(model.parts, config.optimizer.grad_clip, model.stages)
                assert math.isfinite(norm)  # as NonfiniteGuard asks
                take_step(optimizers, rate)
            log.add(loss, target)
            if step % config.log_every_steps == 0:
                log.write(step, rate, norm, config.global_batch)
            table.due(step)

    return take


def build_bare(workload: Workload, directory: Path) -> Steps:
    model: nn.Module = build_model(workload)
    if dist.get_world_size() > 1:
        model = DistributedDataParallel(model)
    [optimizer] = build_optimizers([model], OPTIMIZER)

    def step(inputs: Tensor, target: Tensor, rate: float) -> Tensor:
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        loss: Tensor = workload.loss(model(inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        return loss

    return _repeat(step, directory)


def build_fabric(workload: Workload, directory: Path) -> Steps:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    world_size = dist.get_world_size()
    strategy = DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    bare = build_model(workload)
    [optimizer] = build_optimizers([bare], OPTIMIZER)
    model, wrapped = fabric.setup(bare, optimizer)

    def step(inputs: Tensor, target: Tensor, rate: float) -> Tensor:
        set_rate(optimizer, rate)
        wrapped.zero_grad()
        loss: Tensor = workload.loss(model(inputs), target)
        fabric.backward(loss)
        fabric.clip_gradients(model, wrapped, max_norm=GRAD_CLIP)
        wrapped.step()
        return loss

    return _repeat(step, directory)


def build_accelerate(workload: Workload, directory: Path) -> Steps:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    bare = build_model(workload)
    [optimizer] = build_optimizers([bare], OPTIMIZER)
    model, wrapped = accelerator.prepare(bare, optimizer)
    assert isinstance(model, DistributedDataParallel) == (dist.get_world_size() > 1)

    def step(inputs: Tensor, target: Tensor, rate: float) -> Tensor:
        set_rate(optimizer, rate)
        wrapped.zero_grad()
        loss: Tensor = workload.loss(model(inputs), target)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        wrapped.step()
        return loss

    return _repeat(step, directory)


def _repeat(take_one: Callable[[Tensor, Tensor, float], Tensor], directory: Path) -> Steps:
    """What every script has around its step: the rate's schedule, now and then a line of log."""
    data, step = Data(dist.get_rank()), 0

    def take(num_steps: int) -> None:
        nonlocal step
        for _ in range(num_steps):
            step += 1
            loss = take_one(*data.next(), learning_rate(OPTIMIZER, step, NUM_STEPS))
            if step % LOG_EVERY == 0 and dist.get_rank() == 0:
                with (directory / "log.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")

    return take


def build_model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model({"max_length": LENGTH, "width": 64, "num_heads": 4, "num_layers": 3})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def rank(number: int, world_size: int, directory: str) -> None:
    """One worker: all loops in turns; rank 0 leaves the seconds a step of every block."""
    if world_size > 1:  # as torchrun sets them: Fabric and Accelerate look
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_RUN_ID": "benchmark",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=world_size
    )
    workload = load_workload("examples.place_names", ROOT)
    builders = {
        OURS: build_ours,
        BARE: build_bare,
        "Lightning Fabric": build_fabric,
        "Accelerate": build_accelerate,
    }
    loops: dict[str, Steps] = {}
    for name, build in builders.items():
        own = Path(directory) / name
        own.mkdir(exist_ok=True)
        loops[name] = build(workload, own)
    for take in loops.values():
        take(BLOCK_STEPS)  # warm up
    names = list(loops)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            started = perf_counter()
            loops[name](BLOCK_STEPS)
            dist.barrier()
            seconds[name].append((perf_counter() - started) / BLOCK_STEPS)
    if number == 0:
        (Path(directory) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def compare(seconds: dict[str, Sequence[float]], num_workers: int) -> list[Row]:
    """Ours against each of the others."""
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    rows = []
    for other, limit in LIMITS.items():
        pairs = zip(seconds[OURS], seconds[other], strict=True)
        ratio = median(ours / theirs for ours, theirs in pairs)
        rows.append(
            Row(
                case=f"{workers}, {other}",
                ours=1000 * median(seconds[OURS]),
                reference=1000 * median(seconds[other]),
                ratio=ratio,
                target=f"at most {limit:.2f} times",
                holds=ratio <= limit,
            )
        )
    return rows


def main() -> None:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    rows: list[Row] = []
    for world_size in (1, 2):
        with tempfile.TemporaryDirectory() as directory:
            spawn(rank, (world_size, directory), world_size)  # type: ignore[no-untyped-call]
            seconds = json.loads((Path(directory) / "seconds.json").read_text())
        print({name: f"{1000 * min(values):.2f} ms at best" for name, values in seconds.items()})
        rows += compare(seconds, world_size)
    publish("step", "ms", rows)


if __name__ == "__main__":
    main()
