"""One worker's copy of the model and its optimiser, where copies differ between averages."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Replica:
    """What this worker has for itself: parameters, buffers, and the optimiser's state.

    It makes all ranks' models equal when it is built, to rank 0's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._aside: dict[str, Tensor] | None = None
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Those that are trained, by name."""
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def average(self) -> None:
        """Make all ranks' models equal, to the mean; the optimisers stay their own."""
        average([p.detach() for p in self.parameters.values()])
        self.average_buffers()

    def average_buffers(self) -> None:
        """Make the buffers of all ranks equal: their mean, and of whole numbers rank 0's."""
        buffers = [buffer for _, buffer in self._model.named_buffers()]
        average([b for b in buffers if b.is_floating_point()])
        for buffer in buffers:
            if not buffer.is_floating_point():
                dist.broadcast(buffer, 0)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, model and optimiser are the mean over ranks, which any number of workers can go
        on from; `read` still gives this worker's own."""
        live = self._live()
        self._aside = {name: tensor.clone() for name, tensor in live.items()}
        average([t for t in live.values() if t.is_floating_point()])
        try:
            yield
        finally:
            for name, tensor in live.items():
                tensor.copy_(self._aside[name])
            self._aside = None

    def read(self) -> dict[str, Tensor]:
        """This worker's own tensors by name; they share memory with the live ones."""
        return self._live() if self._aside is None else self._aside

    def write(self, tensors: dict[str, Tensor]) -> None:
        """Take up what `read` gave. KeyError for a name that is missing."""
        for name, tensor in self._live().items():
            tensor.copy_(tensors[name])

    def _live(self) -> dict[str, Tensor]:
        found: dict[str, Any] = {f"model.{n}": t for n, t in self._model.state_dict().items()}
        inner = get_optimizer_state_dict(self._model, self._optimizer, options=_FLAT)
        found |= {f"optimizer.{name}": value for name, value in inner.items()}
        return {name: value.detach() for name, value in found.items() if isinstance(value, Tensor)}


def average(tensors: Sequence[Tensor]) -> None:
    """Replace the tensors, of one dtype each kind, by their means over all ranks: the same bits in
    every rank."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = flatten(alike)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        scatter(flat, alike)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """A new tensor of one dimension with all their numbers."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def scatter(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the numbers of `flatten` back."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.detach().copy_(piece.view_as(tensor))
