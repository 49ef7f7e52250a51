"""The loop: step, log, checkpoint."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
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
from torch.nn.parallel import DistributedDataParallel

from data.sealed_shards import SealedShards
from data.shard import Shard
from training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from training.config import OptimizerConfig, TrainConfig
from training.errors import CheckpointError, TrainingError
from training.evaluate import rehearse
from training.loader import Loader, prefetch
from training.spec import STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.workload import Workload

OnStep = Callable[[dict[str, float]], None]


def train(spec: TrainSpec, workload: Workload, on_step: OnStep) -> None:
    """Train this rank's replica to the last step, from the newest checkpoint if there is one.

    Writes steps, checkpoints and at last the weights into `spec.run_directory`. `on_step` is
    called on rank 0 with each logged step.
    """
    config = spec.config
    sealed, shards = spec.open_shards()
    torch.manual_seed(config.seed)
    bare = workload.model(config.model)
    if dist.get_rank() == 0:
        rehearse(workload, bare, _first_rows(sealed, shards), spec.primary)
    model = DistributedDataParallel(bare)
    # The copies start equal; what is drawn from here on, such as dropout, differs by rank.
    torch.manual_seed(config.seed * dist.get_world_size() + dist.get_rank())
    optimizer = _build_optimizer(model, config.optimizer)
    checkpoints = spec.run_directory / "checkpoints"
    resumed = load_checkpoint(checkpoints, spec.fingerprint, model, optimizer)
    progress = resumed or Checkpoint(step=0, cursor=0, fingerprint=spec.fingerprint)
    loader = Loader(
        sealed,
        shards,
        workload.collate,
        global_batch=config.global_batch,
        replica=dist.get_rank(),
        num_replicas=config.dims.num_replicas,
        seed=config.seed,
        window=config.window_shards,
    )
    log = StepLog(spec.run_directory / STEPS_FILE, progress.step, on_step)
    stop = config.steps * config.global_batch
    with closing(prefetch(loader.batches(progress.cursor, stop))) as batches:
        for step in range(progress.step + 1, config.steps + 1):
            started = time.perf_counter()
            inputs, target = next(batches)
            waited = time.perf_counter() - started
            loss, grad_norm = _step(model, optimizer, workload, config, step, inputs, target)
            log.add(loss, time.perf_counter() - started, waited)
            progress = Checkpoint(
                step=step, cursor=step * config.global_batch, fingerprint=spec.fingerprint
            )
            if step % config.log_every_steps == 0 or step == config.steps:
                log.write(step, optimizer.param_groups[0]["lr"], grad_norm, config.global_batch)
            if step % config.checkpoint.every_steps == 0 or step == config.steps:
                save_checkpoint(checkpoints, progress, model, optimizer, config.checkpoint.keep)
    if dist.get_rank() == 0:
        _save_weights(model.module, spec.run_directory / WEIGHTS_FILE)
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


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of a step (the first is 1): linear warm-up, then half a cosine (SGDR, 2017)."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    ratio = config.final_lr_ratio
    return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    config: TrainConfig,
    step: int,
    inputs: Tensor,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config.optimizer, step, config.steps)
    optimizer.zero_grad(set_to_none=True)
    loss = workload.loss(model(inputs), target)
    if loss.ndim or not torch.isfinite(loss):
        raise TrainingError(
            f"step {step}: the workload's loss() gave {_describe(loss)}; "
            "it must be one finite number. Lower train.optimizer.lr if it grew without bound"
        )
    loss.backward()  # type: ignore[no-untyped-call]
    limit = config.optimizer.grad_clip
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or math.inf)
    optimizer.step()
    return loss.detach(), grad_norm


def _describe(loss: Tensor) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if loss.ndim else str(loss.item())


def _build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    # Biases and gains are not decayed: the habit of the field since BERT.
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    other = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": other, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


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
        if dist.get_rank() == 0:
            kept = [line for line in _read_lines(path) if json.loads(line)["step"] <= resumed_step]
            pending = path.with_suffix(".tmp")
            pending.write_text("".join(kept))
            pending.rename(path)

    def add(self, loss: Tensor, seconds: float, wait_seconds: float) -> None:
        self._window.num_steps += 1
        self._window.loss_sum += loss.item()
        self._window.seconds += seconds
        self._window.wait_seconds += wait_seconds

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
        self._on_step(line)


def _read_lines(path: Path) -> list[str]:
    """The whole lines: a kill can cut the last one."""
    if not path.exists():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
