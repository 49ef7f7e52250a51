"""The loop: step, log, checkpoint."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from training.checkpoint import Checkpoint, Checkpointer
from training.checkpoint_history import StepHistory
from training.checkpoint_random import follow_torch
from training.config import TrainConfig
from training.evaluate import rehearse
from training.heartbeat import Heartbeat
from training.memory import (
    check_memory,
    count_local_workers,
    count_need,
    measure_sample_bytes,
    read_free_bytes,
)
from training.nonfinite import NonfiniteGuard
from training.optimization import (
    build_optimizers,
    clip,
    forget_gradients,
    learning_rate,
    take_step,
)
from training.pace import open_loader, pace
from training.parallel import build_mesh, choose_device, parallelize
from training.plans import rehearse_stages
from training.profiling import StepProfiler
from training.regroup import MakingWay
from training.spec import STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.step_log import OnStep, StepLog
from training.synchronization import build_synchronizer
from training.timing import StepTimer
from training.weights import save_weights
from training.workload import Workload


def train(spec: TrainSpec, workload: Workload, on_step: OnStep) -> None:
    """Train this rank's replica to the last step, from the newest checkpoint if there is one, or
    to the one after which a larger world takes over.

    Writes steps, checkpoints and at last the weights into `spec.run_directory`. `on_step` is
    called on rank 0 with each logged step.
    """
    config = spec.config
    device = choose_device()
    mesh = build_mesh(config.dims, device)
    sealed, shards = spec.open_shards()
    torch.manual_seed(config.seed)
    whole = workload.model(config.model)
    sample_bytes = 0
    if dist.get_rank() == 0:
        rows = list(islice(sealed.open(shards[0]), 2))
        rehearse(workload, whole, rows, spec.primary)
        rehearse_stages(workload, whole, rows, config)
        sample_bytes = measure_sample_bytes(workload, whole, *workload.collate(rows))
    model = parallelize(workload, whole, config, mesh)
    _check_memory(model.parts, config, sample_bytes, device)
    model.seed_after_start(config.seed)
    follow_torch()
    optimizers = build_optimizers(model.parts, config.optimizer)
    checkpoints = Checkpointer(spec, sealed, model.seed_after_start)
    synchronizer = build_synchronizer(config, model, optimizers)
    extras: dict[str, Stateful] = {"synchronize": synchronizer}
    if dist.get_rank() == 0:
        extras["steps"] = StepHistory(spec.run_directory / STEPS_FILE)
    resumed = checkpoints.load(model.parts, optimizers, extras)
    progress = resumed or Checkpoint(step=0, cursor=0)
    making_way = MakingWay(spec, checkpoints.share)
    heartbeat = Heartbeat(spec.run_directory, dist.get_rank())
    timer = StepTimer(on_phase=heartbeat.enter)
    num_batches = config.dims.num_replicas * model.batches_per_step
    log = StepLog(spec.run_directory, progress.step, timer, on_step, device, num_batches)
    grad_norm = 0.0

    def meet(first: int, last: int) -> bool:
        """After these steps, which all ranks have behind them: log them, keep them; whether to go
        on."""
        every = config.log_every_steps
        if last // every > (first - 1) // every or last == config.steps:
            rate = learning_rate(config.optimizer, last, config.steps)
            log.write(last, rate, grad_norm, config.samples_at_once, synchronizer.describe())
        due = [checkpoints.due(step) for step in range(first, last + 1)]
        if making_way.due(last) or any(due):
            with timer.phase("checkpoint"), synchronizer.consolidated():
                reached = Checkpoint(last, last * config.global_batch, log.last_loss)
                checkpoints.save(reached, model.parts, optimizers, extras)
        return not making_way.is_due

    def roll_back() -> int | None:
        forget_gradients(optimizers)
        restored = checkpoints.load(model.parts, optimizers, extras)
        return restored.step if restored else None

    loader = open_loader(config, sealed, shards, workload, model)
    guard = NonfiniteGuard(config, spec.run_directory, loader.order, shards, roll_back)
    steps = pace(config, loader, model, synchronizer, progress.step, timer, meet)
    is_checked = False
    with (
        checkpoints,
        closing(log),
        closing(steps),
        StepProfiler(spec.run_directory, config.profile) as profiler,
    ):
        for step, batches in steps:
            heartbeat.begin_step(step)
            for inputs, target in batches:
                loss = model.forward_backward(inputs.to(device), target.to(device), timer)
            if not is_checked:
                model.check_unsplit()
                is_checked = True
            with timer.phase("optimizer"):
                grad_norm = clip(model.parts, config.optimizer.grad_clip, model.stages)
                if guard.allows(step, loss, grad_norm):
                    take_step(optimizers, learning_rate(config.optimizer, step, config.steps))
                    log.add(loss, target)
                else:
                    forget_gradients(optimizers)
            with timer.phase("communication"):
                synchronizer.after_step(step)
            profiler.step()
        synchronizer.finish()
    heartbeat.end()
    if making_way.is_due:
        if dist.get_rank() == 0:
            making_way.confirm()
    else:
        save_weights(model, workload, config, spec.run_directory / WEIGHTS_FILE)
    dist.barrier()


def _check_memory(
    parts: Sequence[nn.Module], config: TrainConfig, sample_bytes: int, device: torch.device
) -> None:
    """In every rank alike: sample_bytes counts on rank 0, which measured it, and so does the least
    of what is free."""
    measured = torch.tensor([sample_bytes, -read_free_bytes(device)], device=device)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    sample_bytes, free_bytes = int(measured[0]), -int(measured[1])
    sharing = 1 if device.type == "cuda" else count_local_workers()
    check_memory(count_need(parts, config, sample_bytes), config, free_bytes, sharing)
