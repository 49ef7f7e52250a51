"""Parameters that workers add their steps to, each in its own time, within a bound of staleness."""

import threading
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """What a worker goes on from."""

    parameters: Tensor
    claim: int | None
    """The number of the global batch that is this worker's alone; None when all are taken."""
    staleness: int
    """Steps of others that came between this worker's last parameters and its step."""


class ParameterServer:
    """Holds the parameters, adds steps to them one at a time, hands out global batches.

    A step's staleness is the number of steps added since its worker took its parameters. It is
    never above `max_staleness`: a step waits for those before it that it would make too stale
    (stale synchronous parallel: Ho et al., More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server, 2013). So fast workers pass slow ones until the bound, and no step is
    thrown away. Any thread may call.
    """

    def __init__(self, max_staleness: int) -> None:
        self._parameters = torch.empty(0)
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._version = 0
        self._taken: dict[int, int] = {}
        """The version that each worker with a claim computes from."""
        self._next = 0
        self._stop = 0
        self._error: BaseException | None = None
        self.staleness: Counter[int] = Counter()
        """How often a step had each staleness."""

    def open(self, start: int, stop: int, parameters: Tensor) -> None:
        """Hand out the global batches from `start` up to `stop`, beginning with these parameters.
        No worker may have a claim."""
        with self._changed:
            assert not self._taken
            self._next, self._stop = start, stop
            self._parameters = parameters.clone()

    def abort(self, error: BaseException) -> None:
        """A worker was lost: every turn, of those who wait too, raises the first such error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def turn(self, worker: int, change: Tensor | None) -> Turn:
        """Add a worker's step, if it has made one, and give it the parameters and its next claim.

        change: what its optimiser changed since its last turn, as one flat tensor.
        """
        with self._changed:
            staleness = self._add(worker, change) if change is not None else 0
            if self._error is not None:
                raise self._error
            claim = None
            if self._next < self._stop:
                claim = self._next
                self._next += 1
                self._taken[worker] = self._version
            self._changed.notify_all()
            return Turn(self._parameters.clone(), claim, staleness)

    def _add(self, worker: int, change: Tensor) -> int:
        self._changed.wait_for(lambda: self._error is not None or self._may_add(worker))
        staleness = self._version - self._taken.pop(worker)
        self._parameters += change
        self._version += 1
        self.staleness[staleness] += 1
        return staleness

    def _may_add(self, worker: int) -> bool:
        """Whether all others could still add theirs in time, the one that is behind first."""
        others = sorted(version for other, version in self._taken.items() if other != worker)
        return all(
            self._version + 1 + place - version <= self._max_staleness
            for place, version in enumerate(others)
        )
