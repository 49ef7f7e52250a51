"""Where the time of a training went: what moved it on, and what did not."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

StretchKind = Literal["starting", "training", "recovering", "ending"]


class Stretch(BaseModel, frozen=True, extra="forbid"):
    """What a run did from one moment to another. A run is a row of them, without gaps."""

    kind: StretchKind
    """`starting`: to the first step. `training`: a world made steps. `recovering`: from the last
    progress of one world to the first step of the next. `ending`: after the last step."""
    begins: float
    """Seconds since the run was first started; of a run that was called again after its own
    process was ended, since the first call."""
    ends: float
    first_step: int = 0
    """Of a training."""
    last_step: int = 0
    lost_steps: int = 0
    """Of the steps of a training, those that were done again after it."""

    @property
    def seconds(self) -> float:
        return self.ends - self.begins

    @property
    def lost_seconds(self) -> float:
        """Of a training: its steps take equally long here."""
        num_steps = self.last_step - self.first_step + 1
        return self.seconds * min(1.0, self.lost_steps / num_steps)


class Goodput(BaseModel, frozen=True, extra="forbid"):
    """The seconds of a run by what they were for; together all of them."""

    training_seconds: float
    """Steps that count, less what is named below."""
    starting_seconds: float
    """Before the first step, and after the last."""
    data_wait_seconds: float
    """The loop waited for data: the mean of the workers."""
    checkpoint_seconds: float
    """Saving held the loop up."""
    recovery_seconds: float
    """No step was made, after something went wrong or to grow again."""
    lost_seconds: float
    """Steps that were done again."""

    @property
    def total_seconds(self) -> float:
        return float(sum(self.model_dump().values()))

    @property
    def ratio(self) -> float:
        """The share that moved the training on: the goodput."""
        return self.training_seconds / self.total_seconds if self.total_seconds else 0.0


def measure_goodput(stretches: Sequence[Stretch], steps: Sequence[Mapping[str, float]]) -> Goodput:
    """Of a run's stretches, and the lines of its log of steps: each the mean of the steps since
    the line before.

    The term is of "ML Productivity Goodput" (Google, 2024): the share of the time in which the
    training moved on.
    """
    seconds = dict.fromkeys(("starting", "training", "recovering", "ending"), 0.0)
    for stretch in stretches:
        seconds[stretch.kind] += stretch.seconds
    lost = sum(s.lost_seconds for s in stretches if s.kind == "training")
    waited = _sum(steps, "data_wait_seconds")
    saved = _sum(steps, "checkpoint_seconds")
    kept = seconds["training"] - lost
    # A log that covers more than these stretches, or a clock that was set, must not make it less
    # than nothing.
    scale = min(1.0, kept / (waited + saved)) if waited + saved else 1.0
    return Goodput(
        training_seconds=kept - scale * (waited + saved),
        starting_seconds=seconds["starting"] + seconds["ending"],
        data_wait_seconds=scale * waited,
        checkpoint_seconds=scale * saved,
        recovery_seconds=seconds["recovering"],
        lost_seconds=lost,
    )


def _sum(steps: Sequence[Mapping[str, float]], field: str) -> float:
    """Seconds over all steps of a phase whose lines hold the mean of a step."""
    total, before = 0.0, 0.0
    for line in steps:
        total += (line["step"] - before) * line.get(field, 0.0)
        before = line["step"]
    return total


def describe_goodput(goodput: Goodput) -> dict[str, float]:
    """As metrics of a run."""
    seconds = goodput.model_dump()
    return {"goodput": goodput.ratio, **{f"goodput_{k}": v for k, v in seconds.items()}}
