"""Seconds of a training step: Convoy's loop against a bare one, Lightning Fabric and Accelerate.

All train the same model of place names on the same batches, which are in memory, with the same
optimiser, clipping, schedule and, with two workers, DDP. Each has processes of its own, which take
turns in blocks of steps; the order changes from round to round. Ours are as Convoy's worker starts
them, the others as torchrun would. A ratio is the median of those within a round.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.table import Row, publish
from benchmarks.turns import Steps, take_turns
from training.allocator import keep_freed_memory
from training.checkpoint_policy import Timetable
from training.config import OptimizerConfig, ParallelDims, TrainConfig
from training.heartbeat import Heartbeat
from training.optimization import Gradients, build_optimizers, learning_rate, take_step
from training.parallel import build_mesh, parallelize
from training.phases import PHASES
from training.profiling import StepProfiler
from training.step_log import StepLog
from training.synchronization import build_synchronizer
from training.timing import StepTimer
from training.workload import Workload, load_workload

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


def build_ours(directory: Path) -> Steps:
    """The loop of training/trainer.py, less what reads the data and writes a checkpoint."""
    keep_freed_memory()  # as training/worker.py does
    workload = load_places()
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
    gradients = Gradients(model.parts, model.stages)
    synchronizer = build_synchronizer(config, model, optimizers)
    heartbeat = Heartbeat(directory, dist.get_rank())
    timer = StepTimer(on_phase=heartbeat.enter)
    log = StepLog(directory, 0, timer, device, world_size)
    table = Timetable(config.checkpoint, lambda number: number)
    profiler = StepProfiler(directory, config.profile)
    optimizing, communicating = PHASES.index("optimizer"), PHASES.index("communication")
    data, step = Data(dist.get_rank()), 0

    def take(num_steps: int) -> None:
        nonlocal step
        for _ in range(num_steps):
            step += 1
            with timer.phase("data_wait"):
                inputs, target = data.next()
            heartbeat.begin_step(step, timer.seconds)
            loss = model.forward_backward(inputs.to(device), target.to(device), timer)
            timer.enter(optimizing)
            norm = gradients.clip(config.optimizer.grad_clip)
            assert math.isfinite(norm)  # as NonfiniteGuard asks
            rate = learning_rate(config.optimizer, step, config.steps)
            take_step(optimizers, rate)
            log.add(loss, target)
            gradients.forget()
            timer.change(communicating)
            synchronizer.after_step(step)
            timer.leave()
            profiler.step()
            if step % config.log_every_steps == 0:
                log.write(step, rate, norm, config.global_batch)
            table.due(step)

    return take


def build_bare(directory: Path) -> Steps:
    workload = load_places()
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


def build_fabric(directory: Path) -> Steps:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    workload, world_size = load_places(), dist.get_world_size()
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


def build_accelerate(directory: Path) -> Steps:
    from accelerate import Accelerator

    workload = load_places()
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


def load_places() -> Workload:
    return load_workload("examples.place_names", ROOT)


def build_model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model({"max_length": LENGTH, "width": 64, "num_heads": 4, "num_layers": 3})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def compare(seconds: Mapping[str, Sequence[float]], num_workers: int) -> list[Row]:
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
    builders = {
        OURS: build_ours,
        BARE: build_bare,
        "Lightning Fabric": build_fabric,
        "Accelerate": build_accelerate,
    }
    rows: list[Row] = []
    for world_size in (1, 2):
        seconds = take_turns(builders, world_size, ROUNDS, BLOCK_STEPS)
        print({name: f"{1000 * min(values):.2f} ms at best" for name, values in seconds.items()})
        rows += compare(seconds, world_size)
    publish("step", "ms", rows)


if __name__ == "__main__":
    main()
