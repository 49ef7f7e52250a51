"""Where the seconds of a step went, by phase and by rank, for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from pipeline.errors import WorkspaceError

PHASES = {
    "data_wait_seconds": "waiting for data",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "communication_seconds": "exposed communication",
    "optimizer_seconds": "optimiser",
    "checkpoint_seconds": "checkpoint",
    "other_seconds": "other",
}
"""Fields of a step log, and what the report calls them."""


class StepSplit(BaseModel, frozen=True, extra="ignore"):
    """A line of a step log: seconds a step by phase, the mean since the line before."""

    step: int
    data_wait_seconds: float
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    communication_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    other_seconds: float = 0.0
    peak_rss_bytes: float = 0.0
    peak_cuda_bytes: float | None = None

    @property
    def has_split(self) -> bool:
        """Whether it says more than how long data was waited for."""
        return self.forward_seconds + self.backward_seconds > 0


@dataclass(frozen=True)
class RankSpeed:
    """One rank over the whole run."""

    rank: int
    milliseconds: dict[str, float]
    """A step, by phase as the report calls it."""
    busy_milliseconds: float
    """A step, less the exposed communication."""
    peak_bytes: int
    """Resident."""
    peak_cuda_bytes: int | None


def read_rank_steps(directory: Path) -> dict[int, tuple[StepSplit, ...]]:
    """The step logs of the ranks of this machine. Raises WorkspaceError for a broken one."""
    found: dict[int, tuple[StepSplit, ...]] = {}
    for path in directory.glob("steps-*.jsonl"):
        try:
            lines = path.read_bytes().splitlines()
            found[int(path.stem.removeprefix("steps-"))] = tuple(
                StepSplit.model_validate_json(line) for line in lines
            )
        except (ValidationError, ValueError):
            raise WorkspaceError(
                f"{path} is not a log of steps: run `convoy stage train` again"
            ) from None
    return dict(sorted(found.items()))


def compare_ranks(ranks: Mapping[int, Sequence[StepSplit]]) -> tuple[RankSpeed, ...]:
    """The ranks beside each other, by their number."""
    return tuple(_sum_up(rank, lines) for rank, lines in ranks.items() if lines)


def find_slowest(ranks: Sequence[RankSpeed]) -> RankSpeed | None:
    """The rank that worked longest, which the others waited for; None with one rank or none."""
    return max(ranks, key=lambda rank: rank.busy_milliseconds) if len(ranks) > 1 else None


def _sum_up(rank: int, lines: Sequence[StepSplit]) -> RankSpeed:
    means = {
        shown: 1000 * sum(getattr(line, field) for line in lines) / len(lines)
        for field, shown in PHASES.items()
    }
    cuda = [line.peak_cuda_bytes for line in lines if line.peak_cuda_bytes is not None]
    return RankSpeed(
        rank=rank,
        milliseconds=means,
        busy_milliseconds=sum(means.values()) - means[PHASES["communication_seconds"]],
        peak_bytes=int(max(line.peak_rss_bytes for line in lines)),
        peak_cuda_bytes=int(max(cuda)) if cuda else None,
    )
