"""How copies of the model are kept together: one interface, and the choice among its forms."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch.optim import Optimizer

from training.asynchronous import Asynchronous
from training.compression import EveryStep
from training.config import TrainConfig
from training.diloco import DiLoCo
from training.local_sgd import LocalSGD
from training.parallel import ParallelModel
from training.replica import Replica
from training.reproducible import VirtualRanks


class Synchronizer(Protocol):
    """What the loop asks of a way to synchronise. Every rank calls every method."""

    def after_step(self, step: int) -> None:
        """The optimiser has made this step (the first is 1)."""

    def describe(self) -> dict[str, float]:
        """Further fields of a line of the step log."""

    def consolidated(self) -> AbstractContextManager[None]:
        """Inside, model and optimiser are what a checkpoint should hold: the same in all ranks."""

    def finish(self) -> None:
        """After the last step: the models of all ranks become equal."""

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on to the same bits, besides model and optimiser."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this rank, or of rank 0 of another number of ranks: then from
        model and optimiser as they are, with what all ranks share of the state."""


def build_synchronizer(
    config: TrainConfig, model: ParallelModel, optimizers: Sequence[Optimizer]
) -> Synchronizer:
    """What the config names. Raises TrainingError for a model with fewer modules than fragments."""
    how = config.synchronize
    if isinstance(model.forward_backward, VirtualRanks):
        return model.forward_backward
    if not how.is_local:
        return EveryStep(how, model.forwards)
    replica = Replica(model.parts[0], optimizers[0])
    if how.mode == "local_sgd":
        return LocalSGD(replica, how.every_steps)
    if how.mode == "diloco":
        return DiLoCo(replica, how)
    return Asynchronous(replica, how.every_steps, how.max_staleness)
