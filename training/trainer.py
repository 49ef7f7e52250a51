"""The loop: step, log, checkpoint."""

from collections.abc import Sequence
from contextlib import closing
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from data.sealed_shards import SealedShards
from data.shard import Shard
from training.checkpoint import Checkpoint, Checkpointer
from training.checkpoint_history import StepHistory
from training.checkpoint_random import follow_torch
from training.config import TrainConfig
from training.evaluate import rehearse
from training.heartbeat import Heartbeat
from training.memory import (
    check_memory,
    count_local_workers,
    read_free_bytes,
)
from training.memory_need import count_need, measure_sample_bytes
from training.nonfinite import NonfiniteGuard
from training.optimization import Gradients, build_optimizers, learning_rate, take_step
from training.pace import open_loader, pace
from training.parallel import ParallelModel, build_mesh, choose_device, parallelize
from training.phases import PHASES
from training.plans import find_layers, rehearse_stages
from training.profiling import StepProfiler
from training.regroup import MakingWay
from training.spec import STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.step_log import StepLog
from training.synchronization import build_synchronizer
from training.timing import StepTimer
from training.weights import save_weights
from training.workload import Workload

_OPTIMIZER, _COMMUNICATION = PHASES.index("optimizer"), PHASES.index("communication")


def train(spec: TrainSpec, workload: Workload) -> None:
    """Train this rank's replica to the last step, from the newest checkpoint if there is one, or
    to the one after which a larger world takes over.

    Writes steps, checkpoints and at last the weights into `spec.run_directory`.
    """
    device = choose_device()
    sealed, shards = spec.open_shards()
    model = build_model(spec, workload, sealed, shards, device)
    _Training(spec, workload, model, sealed, shards, device).run()
    dist.barrier()


def build_model(
    spec: TrainSpec,
    workload: Workload,
    sealed: SealedShards,
    shards: Sequence[Shard],
    device: torch.device,
) -> ParallelModel:
    """The model spread over the ranks. Before that, what the workload gets wrong is found on two
    records, and too little memory; copies start equal and draw their own numbers from then on."""
    config = spec.config
    mesh = build_mesh(config.dims, device)
    torch.manual_seed(config.seed)
    whole = workload.model(config.model)
    # By every rank: the workload may exchange something in its forward pass.
    rows = list(islice(sealed.open(shards[0]), 2))
    rehearse(workload, whole, rows, spec.primary)
    rehearse_stages(workload, whole, rows, config)
    keeps_inputs = config.activation_checkpointing == "full"
    checkpointed = find_layers(whole) if keeps_inputs else ()
    sample_bytes = measure_sample_bytes(workload, whole, *workload.collate(rows), checkpointed)
    model = parallelize(workload, whole, config, mesh)
    _check_memory(model.parts, config, sample_bytes, device)
    model.seed_after_start(config.seed)
    follow_torch()
    return model


class _Training:
    """One rank's: what it trains, what it keeps, and how far it is."""

    def __init__(
        self,
        spec: TrainSpec,
        workload: Workload,
        model: ParallelModel,
        sealed: SealedShards,
        shards: Sequence[Shard],
        device: torch.device,
    ) -> None:
        config, directory = spec.config, spec.run_directory
        self._spec = spec
        self._config = config
        self._workload = workload
        self._model = model
        self._device = device
        self._optimizers = build_optimizers(model.parts, config.optimizer)
        self._gradients = Gradients(model.parts, model.stages)
        self._checkpoints = Checkpointer(spec, sealed, model.seed_after_start)
        self._synchronizer = build_synchronizer(config, model, self._optimizers)
        self._extras: dict[str, Stateful] = {"synchronize": self._synchronizer}
        if dist.get_rank() == 0:
            self._extras["steps"] = StepHistory(directory / STEPS_FILE)
        self._resumed_step = self._restore() or 0
        self._making_way = MakingWay(spec, self._checkpoints.share)
        self._heartbeat = Heartbeat(directory, dist.get_rank())
        self._timer = StepTimer(on_phase=self._heartbeat.enter)
        num_batches = config.dims.num_replicas * model.batches_per_step
        self._log = StepLog(directory, self._resumed_step, self._timer, device, num_batches)
        self._loader = open_loader(config, sealed, shards, workload, model)
        self._guard = NonfiniteGuard(config, directory, self._loader.order, shards, self._roll_back)
        self._grad_norm = 0.0

    def run(self) -> None:
        """All steps that are left, and the weights; or a commit and the word that it made way."""
        config, model, synchronizer = self._config, self._model, self._synchronizer
        timer = self._timer
        steps = pace(
            config, self._loader, model, synchronizer, self._resumed_step, timer, self._meet
        )
        is_checked = False
        with (
            self._checkpoints,
            closing(self._log),
            closing(steps),
            StepProfiler(self._spec.run_directory, config.profile) as profiler,
        ):
            for step, batches in steps:
                self._heartbeat.begin_step(step, timer.seconds)
                for inputs, target in batches:
                    loss = model.forward_backward(
                        inputs.to(self._device), target.to(self._device), timer
                    )
                if not is_checked:
                    model.check_unsplit()
                    is_checked = True
                timer.enter(_OPTIMIZER)
                self._update(step, loss, target)
                timer.change(_COMMUNICATION)
                synchronizer.after_step(step)
                timer.leave()
                profiler.step()
            synchronizer.finish()
        self._heartbeat.end()
        if not self._making_way.is_due:
            weights = self._spec.run_directory / WEIGHTS_FILE
            save_weights(model, self._workload, config, weights)
        elif dist.get_rank() == 0:
            self._making_way.confirm()

    def _update(self, step: int, loss: Tensor, target: Tensor) -> None:
        """Change the parameters by their gradients, unless these are no numbers."""
        optimizer = self._config.optimizer
        self._grad_norm = self._gradients.clip(optimizer.grad_clip)
        if self._guard.allows(step, loss, self._grad_norm):
            take_step(self._optimizers, learning_rate(optimizer, step, self._config.steps))
            self._log.add(loss, target)
        self._gradients.forget()

    def _meet(self, first: int, last: int) -> bool:
        """After these steps, which all ranks have behind them: log them, keep them; whether to go
        on."""
        config, every = self._config, self._config.log_every_steps
        if last // every > (first - 1) // every or last == config.steps:
            rate = learning_rate(config.optimizer, last, config.steps)
            more = self._synchronizer.describe()
            self._log.write(last, rate, self._grad_norm, config.samples_at_once, more)
        due = [self._checkpoints.due(step) for step in range(first, last + 1)]
        if self._making_way.due(last) or any(due):
            with self._timer.phase("checkpoint"), self._synchronizer.consolidated():
                reached = Checkpoint(last, last * config.global_batch, self._log.last_loss)
                self._checkpoints.save(reached, self._model.parts, self._optimizers, self._extras)
        return not self._making_way.is_due

    def _roll_back(self) -> int | None:
        self._gradients.forget()
        return self._restore()

    def _restore(self) -> int | None:
        """Take the newest checkpoint's state; its step, None when there is none."""
        restored = self._checkpoints.load(self._model.parts, self._optimizers, self._extras)
        return restored.step if restored else None


def _check_memory(
    parts: Sequence[nn.Module], config: TrainConfig, sample_bytes: int, device: torch.device
) -> None:
    """In every rank alike: the most that a sample takes counts, and the least that is free."""
    measured = torch.tensor([sample_bytes, -read_free_bytes(device)], device=device)
    dist.all_reduce(measured, op=dist.ReduceOp.MAX)
    sample_bytes, free_bytes = int(measured[0]), -int(measured[1])
    sharing = 1 if device.type == "cuda" else count_local_workers()
    check_memory(count_need(parts, config, sample_bytes), config, free_bytes, sharing)
