"""Microbatches through pipeline stages, by the schedules of torch.distributed.pipelining."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from training.config import PipelineConfig
from training.passes import read_loss, seed_gradient
from training.timing import StepTimer

_SCHEDULES: dict[str, type[Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": ScheduleZBVZeroBubble,
}
_KEPT_SHAPES = 64


def place_stages(config: PipelineConfig, num_ranks: int) -> list[list[int]]:
    """The stages of each rank of a pipeline: round and round, or for zbv down and up again."""
    num_stages = num_ranks * config.stages_per_worker
    if config.schedule == "zbv_zero_bubble":
        return [[rank, num_stages - 1 - rank] for rank in range(num_ranks)]
    return [list(range(rank, num_stages, num_ranks)) for rank in range(num_ranks)]


class Pipeline:
    """Passes a batch, cut into microbatches, forward and backward through the stages.

    parts: this rank's stages, as place_stages() says. group: the ranks of the pipeline. loss: of a
    microbatch, its mean. around: entered around each pass.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        group: dist.ProcessGroup,
        device: torch.device,
        config: PipelineConfig,
        loss: Callable[[Tensor, Tensor], Tensor],
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        placed = place_stages(config, group.size())
        self._num_stages = group.size() * config.stages_per_worker
        self._stages = list(zip(placed[group.rank()], parts, strict=True))
        [self._last] = [n for n, held in enumerate(placed) if self._num_stages - 1 in held]
        self._group = group
        self._device = device
        self._config = config
        self._loss = loss
        self._around = around
        # Stages exchange tensors of a shape that they agree on once.
        self._schedule = lru_cache(maxsize=_KEPT_SHAPES)(self._build_schedule)

    def __call__(self, inputs: Tensor, target: Tensor, timer: StepTimer) -> Tensor:
        """Add the batch's gradient; its mean loss, in every rank of the pipeline."""
        schedule = self._schedule(inputs.shape, target.shape)
        losses: list[Tensor] = []
        is_first, is_last = self._stages[0][0] == 0, self._group.rank() == self._last
        # The schedule mixes forward and backward passes, and waiting for the other stages.
        with timer.phase("backward"), self._around():
            schedule.step(
                *((inputs,) if is_first else ()),
                target=target if is_last else None,
                losses=losses if is_last else None,
                return_outputs=False,
            )
        loss = torch.zeros((), device=self._device)
        if is_last:
            loss = torch.stack([read_loss(each) for each in losses]).sum()
        with timer.phase("communication"):
            dist.broadcast(loss, group=self._group, group_src=self._last)
        return loss

    def _build_schedule(self, inputs: torch.Size, target: torch.Size) -> Any:
        stages = [
            PipelineStage(part, number, self._num_stages, self._device, group=self._group)
            for number, part in self._stages
        ]
        return _SCHEDULES[self._config.schedule](
            stages[0] if self._config.stages_per_worker == 1 else stages,
            self._config.microbatches,
            loss_fn=self._weigh_loss,
            scale_grads=False,
        )

    def _weigh_loss(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self._loss(output, target)
        return loss * seed_gradient(loss.detach()) / self._config.microbatches
