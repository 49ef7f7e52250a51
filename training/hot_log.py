"""The step log of a hot world, whose ranks come and go."""

import json
from collections import deque
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.spec import STEPS_FILE, rank_steps_file
from training.step_log import (
    SPLIT,
    append,
    continue_file,
    describe_own,
    describe_rows,
    measure_peak_memory,
)
from training.timing import StepTimer

_KEPT_LINES = 16


class HotLog:
    """Sums up the steps between two lines. Every replica has the loss of every step, of the whole
    batch, and every line; the first of the quorum writes those that the file lacks, so that none is
    lost with a replica.
    """

    def __init__(
        self, directory: Path, number: int, timer: StepTimer, device: torch.device
    ) -> None:
        self._path = directory / STEPS_FILE
        self._number = number
        self._timer = timer
        self._device = device
        self._losses: list[float] = []
        self._num_steps = 0
        self._num_targets = 0
        self._split = [0.0] * len(SPLIT)
        self._lines: deque[dict[str, float]] = deque(maxlen=_KEPT_LINES)
        self._own_path = directory / rank_steps_file(number)
        self._own: TextIOWrapper | None = None
        self._joint: TextIOWrapper | None = None
        self._written = -1.0

    @property
    def last_loss(self) -> float | None:
        """Of the last line."""
        return self._lines[-1]["loss"] if self._lines else None

    @property
    def has_news(self) -> bool:
        """Whether there is a line that `write` has not seen to."""
        return bool(self._lines) and self._lines[-1]["step"] > self._written

    def begin(self, step: int) -> None:
        """This replica goes on from here."""
        self.close()
        self._own = continue_file(self._own_path, step)
        self._split = [0.0] * len(SPLIT)
        self._timer.take()

    def add(self, loss: float, target: Tensor) -> None:
        """A step was made: its mean loss over the whole batch, and what this replica predicted."""
        self._losses.append(loss)
        self._num_steps += 1
        if target.ndim > 1:
            self._num_targets += target.numel()

    def measure(self, target: Tensor) -> Tensor:
        """What this replica adds to the next line: of the steps since the last one, and of the
        present one, which predicts `target`."""
        spent = self._timer.take().values()
        self._split = [before + now for before, now in zip(self._split, spent, strict=True)]
        num_steps = self._num_steps + 1
        split = [seconds / num_steps for seconds in self._split]
        memory = measure_peak_memory(self._device).values()
        num_targets = self._num_targets + (target.numel() if target.ndim > 1 else 0)
        row = [0.0, num_targets / num_steps, *split, *memory, num_steps]
        return torch.tensor(row, dtype=torch.float64)

    def note(
        self, rows: Tensor, replicas: Sequence[int], head: dict[str, float], samples: int
    ) -> None:
        """A line is due, with what all have measured. replicas: whose rows they are."""
        if self._losses:
            # All replicas have the same losses, whenever they came.
            rows[:, 0] = sum(self._losses) / len(self._losses)
            line = describe_rows(rows[:, :-1], rows[:, -1], head, samples, len(rows))
            line["loss"] = float(rows[0, 0])
            line["slowest_rank"] = replicas[int(line["slowest_rank"])]
            self._lines.append(line)
            assert self._own
            own = rows[list(replicas).index(self._number), :-1].tolist()
            append(self._own, describe_own(int(head["step"]), self._number, own))
        self._losses, self._num_steps, self._num_targets = [], 0, 0
        self._split = [0.0] * len(SPLIT)

    def write(self, step: int) -> None:
        """Of the first of the quorum: have the file hold all lines to this step."""
        if self._joint is None:
            self._joint = continue_file(self._path, step)
            self._written = _last_step(self._path)
        for line in self._lines:
            if line["step"] > self._written:
                append(self._joint, line)
                self._written = line["step"]

    def let_go(self) -> None:
        """Another one is the first of the quorum."""
        if self._joint is not None:
            self._joint.close()
            self._joint = None
            self._written = -1.0

    def state_dict(self) -> dict[str, Any]:
        """What another replica needs to go on in this one's place."""
        return {"losses": self._losses, "lines": list(self._lines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses = list(state["losses"])
        self._num_steps = self._num_targets = 0
        self._lines = deque(state["lines"], maxlen=_KEPT_LINES)

    def close(self) -> None:
        """Close the files."""
        self.let_go()
        if self._own is not None:
            self._own.close()
            self._own = None


def _last_step(path: Path) -> float:
    lines = path.read_bytes().splitlines()
    return float(json.loads(lines[-1])["step"]) if lines else -1.0
