"""What is to happen to the nodes of a simulated run: plain values. Loads no torch."""

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

FaultName = Literal["kill", "stop", "cut", "slow", "fill", "clock", "mend"]
FAULTS: tuple[FaultName, ...] = get_args(FaultName)

_ENDURING = ("stop", "cut", "slow", "fill", "clock")
_OF_RANKS = ("kill", "stop")


class Fault(BaseModel, frozen=True, extra="forbid"):
    """One thing that is done to a node, or to one rank."""

    fault: FaultName
    """kill: its processes are ended. stop: they are stopped, as by Ctrl-Z. cut: its link is down.
    slow: its link lets `rate_mbit` through. fill: its disk is full. clock: its wall clock is moved
    by `move_seconds`. mend: all of this is undone but death."""
    node: NonNegativeInt | None = None
    """Its number, from 0."""
    rank: NonNegativeInt | None = None
    """In place of the node, for kill and stop: this worker alone."""
    step: PositiveInt | None = None
    """When the run first comes to this step."""
    second: NonNegativeFloat | None = None
    """In place of the step: so long after the run was started."""
    for_seconds: PositiveFloat | None = None
    """Then it is undone; null: not by itself."""
    rate_mbit: Annotated[float, Field(ge=0.001)] | None = None
    """For slow: megabits a second in each direction."""
    move_seconds: float | None = None
    """For clock: from where it would be."""

    @model_validator(mode="after")
    def _fits_itself(self) -> "Fault":
        if (self.node is None) == (self.rank is None):
            raise ValueError(f"{self.fault} needs a node" + self._or_rank())
        if self.rank is not None and self.fault not in _OF_RANKS:
            raise ValueError(f"{self.fault} is done to a node, not to a rank: name its node")
        if self.step is not None and self.second is not None:
            raise ValueError("step and second both say when: take one of them")
        if self.for_seconds is not None and self.fault not in _ENDURING:
            raise ValueError(f"{self.fault} does not last: leave for_seconds out")
        for name, whose in (("rate_mbit", "slow"), ("move_seconds", "clock")):
            if (getattr(self, name) is not None) != (self.fault == whose):
                is_needed = self.fault == whose
                raise ValueError(
                    f"{whose} needs {name}" if is_needed else f"{name} is for {whose}: leave it out"
                )
        return self

    def _or_rank(self) -> str:
        return " or a rank, and not both" if self.fault in _OF_RANKS else ""

    def __str__(self) -> str:
        """What was done, in words."""
        who = f"node {self.node}" if self.rank is None else f"rank {self.rank}"
        lasting = f" for {self.for_seconds:g} s" if self.for_seconds else ""
        match self.fault:
            case "kill":
                return f"{who} was killed"
            case "stop":
                return f"{who} was stopped{lasting}"
            case "cut":
                return f"the link of {who} was cut{lasting}"
            case "slow":
                return f"the link of {who} lets {self.rate_mbit:g} Mbit/s through{lasting}"
            case "fill":
                return f"the disk of {who} was filled{lasting}"
            case "clock":
                return f"the clock of {who} was moved by {self.move_seconds:g} s{lasting}"
            case "mend":
                return f"{who} was mended"


class Scenario(BaseModel, frozen=True, extra="forbid"):
    """A simulated run: what it runs on, and what happens."""

    train: dict[str, Any] = {}
    """Values in place of those of `train` in params.yaml."""
    disk_mib: PositiveInt | None = None
    """Each node has its checkpoints on a disk of its own of this size, which goes with it."""
    faults: tuple[Fault, ...] = ()

    @model_validator(mode="after")
    def _say_when(self) -> "Scenario":
        for number, fault in enumerate(self.faults):
            if fault.step is None and fault.second is None:
                raise ValueError(f"faults.{number}: say when, by step or by second")
        return self
