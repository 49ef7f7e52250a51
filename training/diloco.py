"""DiLoCo: workers step by themselves; an outer optimiser steps along their averaged change."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.errors import TrainingError
from training.replica import Replica, flatten, scatter
from training.synchronize_config import SynchronizeConfig


@dataclass
class _Transfer:
    """The change of a fragment on its way: the sum over ranks, once `work` is done."""

    due: int
    """The step after which it is taken up."""
    change: Tensor
    work: dist.Work | None


class DiLoCo:
    """Outer SGD with Nesterov momentum on the mean of what the workers changed in `every_steps`.

    A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.
    With `num_fragments` the model's parts are averaged at staggered steps, and with
    `overlap_steps` training goes on meanwhile: Streaming DiLoCo, 2025. Every parameter belongs to
    exactly one fragment. The outer parameters are the same bits in all ranks at all times; the
    workers' own are equal after a step that took up all fragments, and at the end.
    """

    def __init__(self, replica: Replica, config: SynchronizeConfig) -> None:
        self._replica = replica
        self._config = config
        self._inner = replica.parameters
        self._fragments = cut_fragments(self._inner, config.num_fragments)
        self._outer = {
            name: nn.Parameter(parameter.detach().clone())
            for name, parameter in self._inner.items()
        }
        momentum = config.outer_momentum
        self._optimizer = torch.optim.SGD(
            self._outer.values(), lr=config.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        self._transfers: dict[int, _Transfer] = {}
        self._is_averaged = True

    def after_step(self, step: int) -> None:
        self._is_averaged = False
        for number in range(len(self._fragments)):
            every_steps = self._config.every_steps
            if step % every_steps == every_steps * number // len(self._fragments):
                self._send(number, step)
            transfer = self._transfers.get(number)
            if transfer is not None and transfer.due == step:
                self._take_up(number)
        if step % self._config.every_steps == 0:
            self._replica.average_buffers()
            self._is_averaged = len(self._fragments) == 1 and not self._transfers

    def describe(self) -> dict[str, float]:
        return {}

    def consolidated(self) -> AbstractContextManager[None]:
        return self._replica.averaged()

    def finish(self) -> None:
        """What is on its way is taken up. Then, where the last steps came after an average, a plain
        one follows: an outer step for so few would move by the momentum of many."""
        for number in list(self._transfers):
            self._take_up(number)
        if not self._is_averaged:
            self._replica.average()
            self._is_averaged = True

    def state_dict(self) -> dict[str, Any]:
        for transfer in self._transfers.values():
            _wait(transfer)
        return {
            "world_size": dist.get_world_size(),
            "is_averaged": self._is_averaged,
            "own": self._replica.read(),
            "outer": {name: tensor.detach() for name, tensor in self._outer.items()},
            "momentum": {
                name: state["momentum_buffer"]
                for name, tensor in self._outer.items()
                if (state := self._optimizer.state[tensor]).get("momentum_buffer") is not None
            },
            "transfers": {
                number: {"due": transfer.due, "change": transfer.change}
                for number, transfer in self._transfers.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self._outer.items():
            tensor.detach().copy_(state["outer"][name])
            if name in state["momentum"]:
                buffer = torch.empty_like(tensor).copy_(state["momentum"][name])
                self._optimizer.state[tensor]["momentum_buffer"] = buffer.detach()
        self._transfers = {}
        if state["world_size"] == dist.get_world_size():
            self._replica.write(state["own"])
            self._is_averaged = state["is_averaged"]
            device = next(iter(self._outer.values())).device
            for number, sent in state["transfers"].items():
                change = sent["change"].to(device)
                self._transfers[number] = _Transfer(sent["due"], change, None)

    def _send(self, number: int, step: int) -> None:
        names = self._fragments[number]
        change = flatten([self._outer[name].detach() - self._inner[name] for name in names])
        work = dist.all_reduce(change, async_op=True)
        self._transfers[number] = _Transfer(step + self._config.overlap_steps, change, work)

    def _take_up(self, number: int) -> None:
        """The outer step of a fragment, and from there its inner parameters."""
        transfer = self._transfers.pop(number)
        _wait(transfer)
        names = self._fragments[number]
        outer = [self._outer[name] for name in names]
        for tensor in outer:
            tensor.grad = torch.empty_like(tensor)
        scatter(
            transfer.change / dist.get_world_size(), [t.grad for t in outer if t.grad is not None]
        )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)  # the step passes over what has no gradient
        keep = self._config.overlap_keep if self._config.overlap_steps else 0.0
        for name, tensor in zip(names, outer, strict=True):
            self._inner[name].detach().lerp_(tensor.detach(), 1.0 - keep)


def _wait(transfer: _Transfer) -> None:
    if transfer.work is not None:
        transfer.work.wait()
        transfer.work = None


def cut_fragments(
    parameters: dict[str, nn.Parameter], num_fragments: int
) -> tuple[tuple[str, ...], ...]:
    """Names of parameters in fragments of about equal size, neighbours together.

    The parameters of one module stay in one fragment. Raises TrainingError for more fragments than
    modules.
    """
    modules: dict[str, list[str]] = {}
    for name in parameters:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    if num_fragments > len(modules):
        raise TrainingError(
            f"params.yaml: train.synchronize.num_fragments is {num_fragments} and the model has "
            f"{len(modules)} modules with parameters: lower it"
        )
    total = sum(parameter.numel() for parameter in parameters.values())
    fragments: list[list[str]] = [[]]
    done = 0
    for index, names in enumerate(modules.values()):
        is_full = done * num_fragments >= total * len(fragments)
        must_start = len(modules) - index == num_fragments - len(fragments)
        if fragments[-1] and len(fragments) < num_fragments and (is_full or must_start):
            fragments.append([])
        fragments[-1] += names
        done += sum(parameters[name].numel() for name in names)
    return tuple(map(tuple, fragments))
