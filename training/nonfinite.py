"""What is done with a batch whose loss or gradient is not a finite number."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor

from data.order import SampleOrder
from data.shard import Shard
from training.config import TrainConfig
from training.errors import TrainingError
from training.spec import NONFINITE_FILE

_log = logging.getLogger(__name__)


class NonfiniteGuard:
    """Lets a step be taken, or does what `train.on_nonfinite` says.

    The ranks decide alike without a word between them: the norm is of the whole gradient and the
    same number in each, and no number where the loss of any sample was none. What is left out is
    said in the log, and in a file of the run by the names of shards and the numbers of rows.

    roll_back: puts the last checkpoint's state into the model and the optimisers, and gives its
    step; None when there is none. is_first: whether this rank is the one that says so.
    """

    def __init__(
        self,
        config: TrainConfig,
        directory: Path,
        order: SampleOrder,
        shards: Sequence[Shard],
        roll_back: Callable[[], int | None],
        is_first: Callable[[], bool] = lambda: dist.get_rank() == 0,
    ) -> None:
        self._config = config
        self._path = directory / NONFINITE_FILE
        self._order = order
        self._shards = shards
        self._roll_back = roll_back
        self._is_first = is_first
        self._num_left_out = 0

    def allows(self, step: int, loss: Tensor, grad_norm: float) -> bool:
        """Whether to change the parameters by the gradient. If not, they are as they should be for
        the next step. Raises TrainingError where training should stop."""
        if math.isfinite(grad_norm):
            return True
        batch, policy = self._name_batch(step), self._config.on_nonfinite
        if policy == "stop":
            refuse(step, loss, grad_norm, batch)
        if self._num_left_out == self._config.max_nonfinite:
            why = f"params.yaml: train.max_nonfinite: {self._num_left_out} were left out before it"
            refuse(step, loss, grad_norm, f"{batch}; {why}")
        self._num_left_out += 1
        done = "the batch is left out"
        if policy == "roll_back":
            restored = self._roll_back()
            if restored is None:
                why = "there is no checkpoint yet to go back to"
                refuse(step, loss, grad_norm, f"{batch}; {why}")
            done = f"the parameters are those of step {restored} again; on with the next batch"
        if self._is_first():
            _log.warning("step %d: the gradient's norm is %s: %s. %s", step, grad_norm, done, batch)
            self._write(step)
        return False

    def _name_batch(self, step: int) -> str:
        stop = step * self._config.global_batch
        epoch = (stop - self._config.global_batch) // self._order.num_samples
        return f"global positions {stop - self._config.global_batch} to {stop - 1}, epoch {epoch}"

    def _write(self, step: int) -> None:
        stop = step * self._config.global_batch
        batch = self._order.slice(stop - self._config.global_batch, stop)
        samples = [
            [self._shards[shard].name, int(row)]
            for shard, row in zip(batch.shards, batch.rows, strict=True)
        ]
        line = {"step": step, "action": self._config.on_nonfinite, "samples": samples}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def refuse(step: int, loss: Tensor, grad_norm: float, batch: str) -> NoReturn:
    """Raise TrainingError, naming the batch, whose loss or gradient is no number."""
    raise TrainingError(
        f"step {step}: the workload's loss() gave {loss.item()}, and the gradient's norm is "
        f"{grad_norm}; both must be finite. Lower train.optimizer.lr if it grew without "
        f"bound, or see params.yaml: train.on_nonfinite. The batch: {batch}"
    )
