"""A batch forward and backward through a model that is not cut into stages."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from training.errors import WorkloadError
from training.phases import PHASES
from training.timing import StepTimer
from training.workload import Workload

_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")


class WholeModel:
    """Passes a batch through a model, in `accumulate` parts one after another.

    Replicas exchange gradients in the last of them alone. Parts of unequal size weigh by their
    samples, so that the gradient is that of the batch's mean. forward: the model as it is called.
    loss: of a part, its mean. around: entered around each pass.
    """

    def __init__(
        self,
        forward: nn.Module,
        accumulate: int,
        loss: Callable[[Tensor, Tensor], Tensor],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._forward = forward
        self._accumulate = accumulate
        self._loss = loss
        self._around = around
        self._is_alone = dist.get_world_size() == 1

    def __call__(self, inputs: Tensor, target: Tensor, timer: StepTimer) -> Tensor:
        """Add the batch's gradient; its mean loss."""
        if self._accumulate == 1:
            return self._pass(inputs, target, timer)
        parts = zip(
            inputs.tensor_split(self._accumulate),
            target.tensor_split(self._accumulate),
            strict=True,
        )
        losses = []
        for number, (some, their_target) in enumerate(parts, 1):
            weight = len(some) / len(inputs)
            with self._exchanging(number == self._accumulate):
                losses.append(self._pass(some, their_target, timer, weight) * weight)
        return torch.stack(losses).sum()

    def _pass(
        self, inputs: Tensor, target: Tensor, timer: StepTimer, weight: float = 1.0
    ) -> Tensor:
        with self._around():
            timer.enter(_FORWARD)
            loss = self._loss(self._forward(inputs), target)
            timer.change(_BACKWARD)
            if not self._is_alone:
                timer.watch_backward(loss)
            value = loss.detach()
            seed = seed_gradient(value)
            loss.backward(seed if weight == 1 else seed * weight)  # type: ignore[no-untyped-call]
            timer.leave()
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _exchanging(self, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self._forward, DistributedDataParallel):
            return nullcontext() if is_last else self._forward.no_sync()
        if isinstance(self._forward, FSDPModule):
            self._forward.set_requires_gradient_sync(is_last)
        return nullcontext()


def compute_loss(workload: Workload, output: Tensor, target: Tensor) -> Tensor:
    """The workload's loss, in float32 whatever the layers computed in."""
    return workload.loss(output.float() if output.dtype == torch.bfloat16 else output, target)


def read_loss(loss: Tensor) -> Tensor:
    """Its value, apart from what made it."""
    value = loss.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def seed_gradient(value: Tensor) -> Tensor:
    """What a backward pass starts from: one, and not a number where the loss's value is not finite.
    So the gradient is not finite either, and every rank that it is averaged with knows."""
    return torch.rsub(value, 1, alpha=0)  # 1 - 0 * value


def checkpoint_activations(workload: Workload, layers: Iterable[nn.Module]) -> None:
    """Keep of each layer's forward pass its input alone, and compute the rest again when needed.

    Raises WorkloadError for a model without repeated layers.
    """
    num_layers = 0
    for layer in layers:
        # Around the function and not the module, whose parameters would get other names.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        num_layers += 1
    if not num_layers:
        raise WorkloadError(
            "params.yaml: train.activation_checkpointing: full needs layers in a ModuleList, "
            f"ModuleDict or Sequential, and the model of {workload.module.__file__} has none: "
            "put them into one, or set none"
        )
