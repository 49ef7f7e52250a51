"""When a checkpoint is due, and which are kept. Loads no torch."""

import math
import time
from collections.abc import Callable, Sequence

from training.checkpoint_commit import Found
from training.config import CheckpointConfig

_FIRST_COST_SECONDS = 1.0
"""What `auto` takes a checkpoint to cost before it has seen one."""


def best_interval_seconds(cost_seconds: float, failure_seconds: float) -> float:
    """Seconds between checkpoints that lose the least: sqrt(2 cost * mean time between failures).

    J. W. Young, A first order approximation to the optimum checkpoint interval, 1974.
    """
    return math.sqrt(2 * cost_seconds * failure_seconds)


def expect_failure_seconds(
    configured_seconds: float, running_seconds: float, num_failures: int
) -> float:
    """Mean time between failures: what is configured counts as one failure that was seen."""
    return (configured_seconds + running_seconds) / (1 + num_failures)


def choose_kept(found: Sequence[Found], keep: int, best: bool) -> set[str]:
    """Names of the newest `keep`, and of the one of the lowest loss."""
    by_age = sorted(found, key=lambda one: one.age)
    kept = {one.name for one in by_age[-keep:]}
    if best and (name := find_best(found)):
        kept.add(name)
    return kept


def find_best(found: Sequence[Found]) -> str | None:
    """The name of the one of the lowest training loss, the newest of equal ones."""
    losses = [one for one in found if one.commit.loss is not None]
    if not losses:
        return None
    return min(losses, key=lambda one: (one.commit.loss, -one.commit.step)).name


class Timetable:
    """Says at which steps a checkpoint is due; all ranks say the same.

    Steps are counted by each rank. Of seconds only rank 0's clock counts, and it is asked seldom:
    it names the step at which the ranks look again, half way to when it expects a checkpoint to be
    due. `share(number)` gives every rank rank 0's number.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        share: Callable[[int], int],
        *,
        running_seconds: float = 0.0,
        num_failures: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._share = share
        self._clock = clock
        self._started = clock()
        self._running_before = running_seconds
        self._num_failures = num_failures
        self._cost_seconds = _FIRST_COST_SECONDS
        self._duration_seconds = 0.0
        self._since: tuple[int, float] | None = None
        self._look_at = 0

    @property
    def running_seconds(self) -> float:
        """What the run trained, over all its starts."""
        return self._running_before + self._clock() - self._started

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between checkpoints now; None when steps alone count."""
        seconds = self._config.every_seconds
        if seconds is None:
            return None
        if seconds != "auto":
            return seconds
        failure_seconds = expect_failure_seconds(
            self._config.failure_seconds, self.running_seconds, self._num_failures
        )
        best = best_interval_seconds(self._cost_seconds, failure_seconds)
        return max(best, self._duration_seconds)  # the one before must be whole

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step. Called by every rank after every step."""
        if self._since is None:
            self._since = (step - 1, self._started)
        every = self._config.steps_between
        if every is not None and step % every == 0:
            return True
        if self._config.every_seconds is None or step < self._look_at:
            return False
        self._look_at = self._share(self._decide(step))
        return self._look_at == step

    def note(self, step: int, cost_seconds: float) -> None:
        """A checkpoint was begun after this step, which training waited so long for."""
        self._cost_seconds = cost_seconds
        self._since = (step, self._clock())
        self._look_at = 0

    def note_duration(self, seconds: float) -> None:
        """A checkpoint took so long to be whole, most of it beside the training."""
        self._duration_seconds = seconds

    def _decide(self, step: int) -> int:
        """Rank 0's: this step if a checkpoint is due, else the step to look again at."""
        assert self._since is not None
        assert self.interval_seconds is not None
        since_step, since = self._since
        elapsed = self._clock() - since
        step_seconds = elapsed / (step - since_step)
        left = self.interval_seconds - elapsed
        if left < step_seconds / 2:
            return step
        return step + max(1, int(left / step_seconds / 2))
