"""Optimisers, the learning rate's schedule, and the norm of a gradient under every layout."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    return AdamW(groups_of_torch, lr=config.lr, betas=config.betas, fused=True)


@dataclass(frozen=True)
class _Kept:
    """Of the parameters of one group that had a gradient: what torch's kernel is called with."""

    group: dict[str, Any]
    parameters: list[Tensor]
    averages: list[Tensor]
    squares: list[Tensor]
    count: Tensor
    """Steps that each parameter has seen."""
    counts: list[Tensor]
    """The same, a view for each parameter."""


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW, to the same bits, that keeps from step to step the lists which torch
    gathers anew, and adds to all parameters' counts of steps at once."""

    _kept: list[_Kept] | None = None
    _others: tuple[Tensor, ...] = ()
    """Parameters that had no gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """torch's own where nothing is kept, or other parameters have a gradient than did."""
        gradients = None if closure else self._gather()
        if gradients is None:
            result = super().step(closure)
            self._kept = self._keep()
            return result
        assert self._kept is not None
        for kept, alike in zip(self._kept, gradients, strict=True):
            beta1, beta2 = kept.group["betas"]
            kept.count.add_(1)
            torch._fused_adamw_(
                kept.parameters,
                alike,
                kept.averages,
                kept.squares,
                [],
                kept.counts,
                lr=kept.group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=kept.group["weight_decay"],
                eps=kept.group["eps"],
                amsgrad=False,
                maximize=False,
            )
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = None
        super().load_state_dict(state_dict)

    def _gather(self) -> list[list[Tensor]] | None:
        """The gradients of each group; None when they are not of the parameters that are kept."""
        if self._kept is None or any(p.grad is not None for p in self._others):
            return None
        gathered = []
        for kept in self._kept:
            gradients = [g for p in kept.parameters if (g := p.grad) is not None]
            if len(gradients) < len(kept.parameters):
                return None
            gathered.append(gradients)
        return gathered

    def _keep(self) -> list[_Kept] | None:
        """None where one call takes not all of a group: split tensors, or kinds that differ."""
        groups = []
        every = [p for group in self.param_groups for p in group["params"]]
        self._others = tuple(p for p in every if p.grad is None)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            kinds = {(p.dtype, p.device) for p in parameters}
            if len(kinds) > 1 or isinstance(parameters[0], DTensor):
                return None
            states = [self.state[p] for p in parameters]
            count = torch.stack([state["step"] for state in states])
            counts = list(count.unbind())
            for state, view in zip(states, counts, strict=True):
                state["step"] = view
            groups.append(
                _Kept(
                    group,
                    parameters,
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    count,
                    counts,
                )
            )
        return groups


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of a step (the first is 1): linear warm-up, then half a cosine (SGDR, 2017)."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    ratio = config.final_lr_ratio
    return config.lr * (ratio + (1 - ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def take_step(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Change the parameters by their gradients, at this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()


class Gradients:
    """The gradients of this rank's parts of a model, whose parameters stay the same.

    stages: the ranks that hold the other parts of the model.
    """

    def __init__(self, parts: Sequence[nn.Module], stages: dist.ProcessGroup | None = None) -> None:
        self._stages = stages
        self._parameters = [parameter for part in parts for parameter in part.parameters()]
        layouts: defaultdict[Any, list[nn.Parameter]] = defaultdict(list)
        for parameter in self._parameters:
            layouts[_layout(parameter)].append(parameter)
        self._layouts = list(layouts.values())
        kinds = {(p.device, p.dtype) for p in self._parameters}
        self._are_alike = len(kinds) == 1 and list(layouts) == [None]

    def clip(self, limit: float | None) -> float:
        """Scale the gradient down to `limit` if its norm is larger; the norm before, of the whole
        model and the same number in every rank. Waits for the gradient.

        limit: null measures alone.
        """
        gradients = [g for p in self._parameters if (g := p.grad) is not None]
        is_plain = self._are_alike and bool(gradients)
        norm = _measure_plain(gradients) if is_plain else self._measure()
        if self._stages is not None:
            squared = norm.square()
            dist.all_reduce(squared, group=self._stages)
            norm = squared.sqrt()
        length = float(norm)
        # Scaling by one would pass over every gradient; where rounding may decide, torch decides.
        if limit is not None and not length < 0.999 * limit - 1e-5:
            if is_plain:
                # What clip_grads_with_norm_() does for them.
                torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
            else:
                for alike in self._layouts:
                    clip_grads_with_norm_(alike, limit, norm)
        return length

    def forget(self) -> None:
        """Of every parameter, as though there had been no backward pass."""
        for parameter in self._parameters:
            parameter.grad = None

    def _measure(self) -> Tensor:
        found = [[g for p in alike if (g := p.grad) is not None] for alike in self._layouts]
        norms = [_unsplit(get_total_norm(gradients)) for gradients in found if gradients]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _measure_plain(gradients: list[Tensor]) -> Tensor:
    """What get_total_norm() does for tensors of one kind that are not split."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def _unsplit(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _layout(tensor: Tensor) -> Any:
    """One call of torch's takes tensors of one layout."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
