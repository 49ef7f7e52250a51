"""What `convoy verify resume` does and finds, as plain values. Loads no torch."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from training.config import ParallelDims, TrainConfig
from training.spec import TrainSpec


def count_parts(config: TrainConfig) -> int:
    """How often a step computes a loss, in each rank that computes it."""
    if config.dims.pp > 1:
        return config.pipeline.microbatches
    return count_batches(config) * config.accumulate


def count_batches(config: TrainConfig) -> int:
    """How many batches a rank collates for a step."""
    return config.virtual_ranks // config.dims.world_size if config.reproducible else 1


class Kill(BaseModel, frozen=True, extra="forbid"):
    """A moment at which worker processes get SIGKILL."""

    when: Literal["step", "accumulation", "save"]
    """step: as its loss is computed. accumulation: as the loss of its second part is. save: while
    the first checkpoint from that step on is being written."""
    step: int
    rank: int | None = None
    """Which one; null kills all of them."""


class ResumeCase(BaseModel, frozen=True, extra="forbid"):
    """One training, undisturbed in `before`'s layout, and once more with kills."""

    name: str
    spec: TrainSpec
    kills: tuple[Kill, ...]
    then: ParallelDims | None = None
    """The layout after the kills, another than before; null stays."""
    loss_tolerance: float = 0.0
    """Largest relative difference of a step's loss; 0 asks for equal bits of everything, also in
    another layout."""
    without_dropout: bool = False
    """Turn torch's dropout layers off: in another layout others are drawn."""


class ResumePlan(BaseModel, frozen=True, extra="forbid"):
    """All cases, in a directory of their own."""

    directory: Path
    cases: tuple[ResumeCase, ...]


class ResumeFinding(BaseModel, frozen=True, extra="forbid"):
    """How a resumed run compares with the undisturbed one."""

    name: str
    layout: str
    kills: tuple[str, ...]
    """What happened, in words."""
    num_tensors: int
    different_parameters: tuple[str, ...]
    different_optimizer: tuple[str, ...]
    different_random: tuple[int, ...]
    """Ranks whose random state differs."""
    different_samples: tuple[int, ...]
    """Steps that trained on other samples, or on the same in another order."""
    different_losses: tuple[int, ...]
    """Steps whose loss, learning rate or gradient norm differs, by more than is allowed."""
    largest_loss_difference: float
    """Relative."""
    loss_tolerance: float
    epochs: float
    """How often the run went through its samples: more than 1 covers an epoch's end."""
    covers: tuple[str, ...]
    """What this run had in it: dropout, an epoch's end, a schedule, mixed precision, ..."""

    @property
    def passed(self) -> bool:
        """Everything is equal; where there is a tolerance, as in another layout, the samples are,
        and the loss is within it."""
        same = not self.different_samples and not self.different_losses
        if self.loss_tolerance:
            return same
        state = self.different_parameters or self.different_optimizer or self.different_random
        return same and not state


class ResumeFindings(BaseModel, frozen=True, extra="forbid"):
    """What the checking process answers."""

    findings: tuple[ResumeFinding, ...]
    error: str | None = None
    """Why a case could not be tried at all."""
