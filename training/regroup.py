"""A world that runs on fewer nodes than the run is to have makes way once they are back.

The supervisor asks by a file. The ranks commit a checkpoint after the step that they are in, and
end: the larger world goes on from there, and no step is made twice. Loads no torch.
"""

import time
from collections.abc import Callable
from pathlib import Path

from training.spec import TrainSpec

_ASKED = "make-way"
_DONE = "made-way"
_LOOK_SECONDS = 1.0


def ask_to_make_way(run_directory: Path) -> None:
    """Have the present world end after a checkpoint, within a second or so and a step."""
    (run_directory / _ASKED).touch()


def has_made_way(run_directory: Path) -> bool:
    """Whether the world that has ended did so to make way, and not because it was done."""
    return (run_directory / _DONE).exists()


def clear_requests(run_directory: Path) -> None:
    """Forget what was asked of an earlier world."""
    for name in (_ASKED, _DONE):
        (run_directory / name).unlink(missing_ok=True)


class MakingWay:
    """Says after which step the ranks end for a larger world; all of them say the same.

    Only rank 0 looks whether it was asked, about once a second: it names the step after which the
    ranks look again, so that a step costs nothing. A world that is whole never looks.
    `share(number)` gives every rank rank 0's number.
    """

    def __init__(
        self,
        spec: TrainSpec,
        share: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = spec.run_directory
        self._is_whole = not spec.lacking_nodes
        self._last_step = spec.config.steps
        self._share = share
        self._clock = clock
        self._looked: tuple[int, float] | None = None
        self._look_at = 0
        self.is_due = False
        """Whether the step was found after which this world ends."""

    def due(self, step: int) -> bool:
        """Whether this is that step. Called by every rank after the same steps."""
        if self._is_whole or step < self._look_at or step == self._last_step:
            return False
        self._look_at = self._share(self._decide(step))
        self.is_due = self._look_at == step
        return self.is_due

    def confirm(self) -> None:
        """Rank 0's: the checkpoint is whole, and all ranks end."""
        (self._directory / _DONE).touch()

    def _decide(self, step: int) -> int:
        """Rank 0's: this step if the world is to end, else the one to look again after."""
        if (self._directory / _ASKED).exists():
            return step
        before, self._looked = self._looked, (step, self._clock())
        if before is None:
            return step + 1
        step_seconds = (self._looked[1] - before[1]) / max(1, step - before[0])
        return step + max(1, min(10_000, int(_LOOK_SECONDS / max(step_seconds, 1e-6))))
