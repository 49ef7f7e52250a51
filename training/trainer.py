"""The loop: step, log, checkpoint."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn

from data.sealed_shards import SealedShards
from data.shard import Shard
from training.checkpoint import Checkpoint, Checkpointer
from training.checkpoint_history import StepHistory
from training.errors import CheckpointError, TrainingError
from training.evaluate import rehearse
from training.loader import Loader, prefetch
from training.optimization import build_optimizers, clip, learning_rate, take_step
from training.parallel import build_mesh, choose_device, parallelize
from training.spec import STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.timing import StepTimer
from training.workload import Workload

OnStep = Callable[[dict[str, float]], None]


def train(spec: TrainSpec, workload: Workload, on_step: OnStep) -> None:
    """Train this rank's replica to the last step, from the newest checkpoint if there is one.

    Writes steps, checkpoints and at last the weights into `spec.run_directory`. `on_step` is
    called on rank 0 with each logged step.
    """
    config = spec.config
    device = choose_device()
    mesh = build_mesh(config.dims, device)
    sealed, shards = spec.open_shards()
    torch.manual_seed(config.seed)
    whole = workload.model(config.model)
    if dist.get_rank() == 0:
        rehearse(workload, whole, _first_rows(sealed, shards), spec.primary)
    model = parallelize(workload, whole, config, mesh)
    model.seed_after_start(config.seed)
    optimizers = build_optimizers(model.parts, config.optimizer)
    checkpoints = Checkpointer(spec, sealed, model.seed_after_start)
    extras = {"steps": StepHistory(spec.run_directory / STEPS_FILE)} if dist.get_rank() == 0 else {}
    resumed = checkpoints.load(model.parts, optimizers, extras)
    progress = resumed or Checkpoint(step=0, cursor=0)
    loader = Loader(
        sealed,
        shards,
        workload.collate,
        global_batch=config.global_batch,
        replica=model.replica,
        num_replicas=config.dims.num_replicas,
        seed=config.seed,
        window=config.window_shards,
    )
    log = StepLog(spec.run_directory / STEPS_FILE, progress.step, on_step)
    timer = StepTimer()
    stop = config.steps * config.global_batch
    with checkpoints, closing(prefetch(loader.batches(progress.cursor, stop))) as batches:
        for step in range(progress.step + 1, config.steps + 1):
            rate = learning_rate(config.optimizer, step, config.steps)
            with timer.phase("data_wait"):
                inputs, target = next(batches)
            loss = model.forward_backward(inputs.to(device), target.to(device), timer)
            with timer.phase("optimizer"):
                grad_norm = clip(model.parts, config.optimizer.grad_clip, model.stages)
                _check_finite(step, loss, grad_norm)
                take_step(optimizers, rate)
            log.add(loss, timer.take())
            if step % config.log_every_steps == 0 or step == config.steps:
                log.write(step, rate, grad_norm, config.global_batch)
            if checkpoints.due(step):
                with timer.phase("checkpoint"):
                    progress = Checkpoint(step, step * config.global_batch, log.last_loss)
                    checkpoints.save(progress, model.parts, optimizers, extras)
    if dist.get_rank() == 0:
        _save_weights(model.parts[0], spec.run_directory / WEIGHTS_FILE)
    dist.barrier()


def _first_rows(sealed: SealedShards, shards: Sequence[Shard]) -> list[dict[str, Any]]:
    return list(islice(sealed.open(shards[0]), 2))


def _save_weights(model: nn.Module, path: Path) -> None:
    try:
        save_model(model, str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); the last checkpoint is whole: make room or "
            "mend the disk and run `convoy stage train`, which goes on from it"
        ) from error


def _check_finite(step: int, loss: Tensor, grad_norm: Tensor) -> None:
    if torch.isfinite(loss) and torch.isfinite(grad_norm):
        return
    raise TrainingError(
        f"step {step}: the workload's loss() gave {loss.item()}, and the gradient's norm is "
        f"{grad_norm.item()}; both must be finite. Lower train.optimizer.lr if it grew without "
        "bound"
    )


@dataclass
class _Window:
    """What happened since the last logged step, on this rank."""

    num_steps: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    wait_seconds: float = 0.0


class StepLog:
    """JSON lines, one for each logged step; a resumed run continues its own file."""

    def __init__(self, path: Path, resumed_step: int, on_step: OnStep) -> None:
        self._path = path
        self._on_step = on_step
        self._window = _Window()
        self.last_loss: float | None = None
        """Of the last line, on rank 0."""
        if dist.get_rank() == 0:
            kept = [line for line in _read_lines(path) if json.loads(line)["step"] <= resumed_step]
            pending = path.with_suffix(".tmp")
            pending.write_text("".join(kept))
            pending.rename(path)

    def add(self, loss: Tensor, seconds: Mapping[str, float]) -> None:
        self._window.num_steps += 1
        self._window.loss_sum += loss.item()
        self._window.seconds += sum(seconds.values())
        self._window.wait_seconds += seconds["data_wait"]

    def write(self, step: int, lr: float, grad_norm: Tensor, global_batch: int) -> None:
        """Mean over ranks and over the steps since the last line. Called by every rank."""
        window, self._window = self._window, _Window()
        means = torch.tensor([window.loss_sum, window.wait_seconds], dtype=torch.float64)
        dist.all_reduce(means, op=dist.ReduceOp.SUM)
        means /= dist.get_world_size() * window.num_steps
        if dist.get_rank() != 0:
            return
        line = {
            "step": step,
            "loss": means[0].item(),
            "lr": lr,
            "grad_norm": grad_norm.item(),
            "step_seconds": window.seconds / window.num_steps,
            "data_wait_seconds": means[1].item(),
            "samples_per_second": global_batch * window.num_steps / window.seconds,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.last_loss = line["loss"]
        self._on_step(line)


def _read_lines(path: Path) -> list[str]:
    """The whole lines: a kill can cut the last one."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
