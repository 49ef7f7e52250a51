"""Optimisers, the learning rate's schedule, and the norm of a gradient under every layout."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from training.config import OptimizerConfig


def build_optimizers(parts: Iterable[nn.Module], config: OptimizerConfig) -> tuple[Optimizer, ...]:
    """One optimiser for each part of the model."""
    return tuple(_build_optimizer(part, config) for part in parts)


def _build_optimizer(part: nn.Module, config: OptimizerConfig) -> Optimizer:
    groups: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in sorted(part.parameters(), key=lambda p: p.ndim < 2):
        groups[parameter.ndim < 2, _layout(parameter)].append(parameter)
    # Biases and gains are not decayed: the habit of the field since BERT.
    groups_of_torch = [
        {"params": alike, "weight_decay": 0.0 if is_vector else config.weight_decay}
        for (is_vector, _), alike in groups.items()
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups_of_torch, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups_of_torch, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of a step (the first is 1): linear warm-up, then half a cosine (SGDR, 2017)."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    ratio = config.final_lr_ratio
    return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def take_step(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Change the parameters by their gradients, at this learning rate, and forget the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    forget_gradients(optimizers)


def forget_gradients(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)


def clip(
    parts: Sequence[nn.Module], limit: float | None, stages: dist.ProcessGroup | None = None
) -> float:
    """Scale the gradient down to `limit` if its norm is larger; the norm before, of the whole
    model and the same number in every rank. Waits for the gradient.

    limit: null measures alone. stages: the ranks that hold the other parts of the model.
    """
    layouts: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
    for part in parts:
        for parameter in part.parameters():
            if parameter.grad is not None:
                layouts[_layout(parameter)].append(parameter)
    norms = [_measure_norm(alike) for alike in layouts.values()]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if stages is not None:
        squared = norm.square()
        dist.all_reduce(squared, group=stages)
        norm = squared.sqrt()
    length = float(norm)
    # Scaling by one would pass over every gradient; where rounding may decide, torch decides.
    if limit is not None and not length < 0.999 * limit - 1e-5:
        for alike in layouts.values():
            clip_grads_with_norm_(alike, limit, norm)
    return length


def _measure_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _layout(tensor: Tensor) -> Any:
    """One call of torch's takes tensors of one layout."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
