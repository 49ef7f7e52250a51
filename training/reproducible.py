"""The same bits whatever the number of workers: gradients summed over virtual ranks in a tree."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.timing import StepTimer

Pass = Callable[[Tensor, Tensor, StepTimer], Tensor]

_BUCKET_NUMBERS = 8 << 20
"""Numbers that are exchanged at once: bounds what the exchange adds to memory."""


class VirtualRanks:
    """Computes the gradient of a global batch as the sum over `num_virtual` fixed parts.

    A floating-point sum depends on its order and a kernel's rounding on its shapes, so neither may
    depend on the number of workers. The global batch is cut into virtual ranks, each worker has a
    run of them, and the loss and gradient of each are computed by themselves, on equal shapes and
    with random numbers of their own. Sums follow the binary tree over virtual ranks: inside a
    worker its subtree, then across workers the rest, each number by one worker (all-to-all,
    all-gather: what an all-reduce sends), never in the order of arrival. The mean is exact, since
    `num_virtual` is a power of two. So the world size, a power of two that divides it, plays no
    part; the machine and the build of torch do.

    Buffers, such as a batch norm's running mean, follow virtual rank 0, as DDP's follow rank 0.
    """

    def __init__(self, model: nn.Module, through: Pass, num_virtual: int, seed: int) -> None:
        """through: adds the gradient of a batch to that of the model, and gives its mean loss."""
        assert num_virtual & (num_virtual - 1) == 0
        assert num_virtual % dist.get_world_size() == 0
        self._through = through
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = list(model.buffers())
        self._num_virtual = num_virtual
        self._seed = seed
        self._step = 1
        self.num_local = num_virtual // dist.get_world_size()
        """Virtual ranks of this worker."""
        self._subtrees: list[tuple[int, Tensor]] = []
        self._num_done = 0
        for tensor in (*model.parameters(), *self._buffers):
            dist.broadcast(tensor.detach(), 0)
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self._buffers_after = self._buffers_before

    def __call__(self, inputs: Tensor, target: Tensor, timer: StepTimer) -> Tensor:
        """Take the next of this worker's virtual ranks' parts, each collated by itself, in order.

        With the last of a step each parameter's gradient becomes the mean over the global batch,
        and the mean loss is given, both the same bits in every worker. A parameter that the loss
        does not depend on has a gradient of zeros.
        """
        virtual = dist.get_rank() * self.num_local + self._num_done
        torch.manual_seed(_seed_of(self._seed, self._step, virtual))
        for buffer, before in zip(self._buffers, self._buffers_before, strict=True):
            buffer.copy_(before)
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._through(inputs, target, timer)
        self._add(self._flatten(loss))
        if virtual == 0:
            self._buffers_after = [buffer.clone() for buffer in self._buffers]
        self._num_done += 1
        if self._num_done < self.num_local:
            return loss
        with timer.phase("communication"):
            return self._end_step()

    def after_step(self, step: int) -> None:
        self._step = step + 1

    def describe(self) -> dict[str, float]:
        return {}

    def consolidated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """Nothing: the models are equal."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of any number of workers."""
        self._step = state["step"]
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def _add(self, gradient: Tensor) -> None:
        """Put a leaf into the tree: two subtrees of one size become one."""
        self._subtrees.append((1, gradient))
        while len(self._subtrees) > 1 and self._subtrees[-1][0] == self._subtrees[-2][0]:
            size, right = self._subtrees.pop()
            _, left = self._subtrees.pop()
            self._subtrees.append((2 * size, left.add_(right)))

    def _end_step(self) -> Tensor:
        [(_, total)] = self._subtrees
        self._subtrees, self._num_done = [], 0
        _sum_over_workers(total)
        total /= self._num_virtual
        for buffer, after in zip(self._buffers, self._buffers_after, strict=True):
            buffer.copy_(after)
            dist.broadcast(buffer, 0)
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        return self._hand_out(total)

    def _flatten(self, loss: Tensor) -> Tensor:
        """All gradients of one part, and its loss as the last number."""
        pieces = [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in self._parameters
        ]
        return torch.cat([*pieces, loss.reshape(1)])

    def _hand_out(self, total: Tensor) -> Tensor:
        sizes = [parameter.numel() for parameter in self._parameters]
        *pieces, loss = torch.split(total, [*sizes, 1])
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
        return loss.reshape(())


def _sum_over_workers(total: Tensor) -> None:
    """Sum in place over workers, neighbours first: the upper part of the tree."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return
    ends = [*range(0, len(total), _BUCKET_NUMBERS), len(total)]
    for start, end in pairwise(ends):
        bucket = total[start:end]
        padded = nn.functional.pad(bucket, (0, -len(bucket) % world_size))
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded)
        sums = received.view(world_size, -1)
        while len(sums) > 1:
            sums = sums[0::2] + sums[1::2]
        dist.all_gather_single(padded, sums[0])
        bucket.copy_(padded[: len(bucket)])


def _seed_of(seed: int, step: int, virtual: int) -> int:
    """Of a virtual rank's random numbers in a step: a function of these alone, so nothing need be
    kept for a resume."""
    # NumPy keeps SeedSequence stable across releases (NEP 19).
    return int(np.random.SeedSequence((seed, step, virtual)).generate_state(1, np.uint64)[0])
