"""Local SGD: workers step by themselves, and their parameters are averaged from time to time."""

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist

from training.replica import Replica


class LocalSGD:
    """Averages the models of all ranks after every `every_steps` steps.

    S. Stich, Local SGD Converges Fast and Communicates Little, 2019. The optimisers' states stay
    each worker's own. With plain SGD and an average in every step it is data parallelism.
    """

    def __init__(self, replica: Replica, every_steps: int) -> None:
        self._replica = replica
        self._every_steps = every_steps
        self._is_averaged = True

    def after_step(self, step: int) -> None:
        self._is_averaged = step % self._every_steps == 0
        if self._is_averaged:
            self._replica.average()

    def describe(self) -> dict[str, float]:
        return {}

    def consolidated(self) -> AbstractContextManager[None]:
        return self._replica.averaged()

    def finish(self) -> None:
        if not self._is_averaged:
            self._replica.average()
            self._is_averaged = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "world_size": dist.get_world_size(),
            "is_averaged": self._is_averaged,
            "own": self._replica.read(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["world_size"] == dist.get_world_size():
            self._replica.write(state["own"])
            self._is_averaged = state["is_averaged"]
