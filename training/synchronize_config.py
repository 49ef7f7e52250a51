"""How and when the copies of a model agree. Loads no torch."""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class SynchronizeConfig(BaseModel, frozen=True, extra="forbid"):
    """How and when the copies of the model agree. What each choice trades:
    docs/synchronization.md."""

    mode: Literal["step", "local_sgd", "diloco", "asynchronous"] = "step"
    """step: gradients are averaged in every step. local_sgd: each worker steps by itself and the
    parameters are averaged from time to time. diloco: the same, and an outer optimiser makes the
    step from one average to the next. asynchronous: each worker takes the next global batch, steps
    by itself, and adds its step to parameters that rank 0 holds; it waits for nobody."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """For step: what is sent of a gradient. Half the bits, or with powersgd two thin matrices."""
    powersgd_rank: PositiveInt = 4
    """Columns of the thin matrices: more keep more of the gradient."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 50
    """Steps that are sent whole before powersgd begins."""
    every_steps: PositiveInt = 32
    """Steps from one average to the next; for asynchronous, global batches after which all workers
    meet with equal parameters, which is where checkpoints may be."""
    outer_lr: PositiveFloat = 0.7
    """For diloco: learning rate of the outer SGD on the averaged change of parameters."""
    outer_momentum: Decay = 0.9
    """For diloco: its Nesterov momentum; 0 has none."""
    num_fragments: PositiveInt = 1
    """For diloco: the model is cut into so many parts, each averaged at steps of its own, so that
    less is sent at once."""
    overlap_steps: NonNegativeInt = 0
    """For diloco: steps that go on while an average is on its way."""
    overlap_keep: Decay = 0.5
    """For diloco with overlap_steps: share of the worker's own parameters in the mix with the outer
    ones that arrive."""
    max_staleness: PositiveInt = 8
    """For asynchronous: steps that others may have added between the parameters that a step was
    computed from and the moment it is added itself. Fast workers wait before it would be more."""

    @property
    def is_local(self) -> bool:
        """Whether workers step by themselves, so that their parameters differ between averages."""
        return self.mode != "step"

    @model_validator(mode="after")
    def _fits_itself(self) -> "SynchronizeConfig":
        if self.compress != "none" and self.mode != "step":
            raise ValueError(
                f"compress: {self.compress} is of gradients, and mode {self.mode} sends none: take "
                "mode step or compress none"
            )
        if self.mode == "diloco" and self.every_steps % self.num_fragments:
            raise ValueError(
                f"every_steps {self.every_steps} must be a multiple of num_fragments "
                f"{self.num_fragments}, which share it evenly"
            )
        if self.mode == "diloco" and self.overlap_steps >= self.every_steps:
            raise ValueError(
                f"overlap_steps {self.overlap_steps} must be less than every_steps "
                f"{self.every_steps}: an average must arrive before the next one is asked for"
            )
        return self
