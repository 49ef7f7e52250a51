"""Asynchronous training: each worker takes the next global batch and waits for nobody."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.parameter_server import ParameterServer, Turn
from training.replica import Replica, flatten, scatter

_CLAIM, _STEP, _END = 0, 1, 2
"""What a worker says: a claim, please; a step, and a claim; the end."""
_NO_CLAIM = -1


class Asynchronous:
    """Workers add their steps to the parameters that rank 0 holds.

    A worker's step is what its own optimiser changed, computed from one whole global batch that no
    other worker has. Rank 0 has a thread for each other worker, and a process group of two to speak
    with it, so that a slow one keeps nobody's messages waiting. After every `every_steps` global
    batches all meet, with the same parameters and nothing under way: there a checkpoint means
    something, and so does the end.
    """

    def __init__(self, replica: Replica, every_steps: int, max_staleness: int) -> None:
        self._replica = replica
        self._every_steps = every_steps
        self._parameters = [p.detach() for p in replica.parameters.values()]
        self._server = ParameterServer(max_staleness)
        """Rank 0's counts."""
        self._turn = Turn(flatten(self._parameters).cpu(), None, 0)
        self.staleness: list[int] = []
        """Of this worker's steps since `describe` was called."""
        self._all = dist.new_group(backend="gloo")
        # Every rank takes part in making each group.
        self._lines = {
            rank: dist.new_group([0, rank], backend="gloo")
            for rank in range(1, dist.get_world_size())
        }
        self._threads: list[threading.Thread] = []
        self._has_begun = False

    def claims(self, start: int, stop: int) -> Iterator[int]:
        """The global batches that this worker is to take, of those from `start` to the next
        meeting, or to `stop`. Call `after_step` for each. All ranks call with the same numbers, and
        leave together with equal models."""
        if dist.get_rank() == 0:
            self._open(start, self.meeting(start, stop))
        dist.barrier(self._all)
        self._has_begun = True
        self._exchange(None)
        while self._turn.claim is not None:
            yield self._turn.claim
        dist.barrier(self._all)
        self._meet()

    def meeting(self, start: int, stop: int) -> int:
        """The global batch before which all meet, for those that begin at `start`."""
        return min(stop, (start // self._every_steps + 1) * self._every_steps)

    def after_step(self, step: int) -> None:
        """Add this worker's step to the parameters, and take them and the next claim."""
        self._exchange(flatten(self._parameters).cpu() - self._turn.parameters)
        self.staleness.append(self._turn.staleness)

    def describe(self) -> dict[str, float]:
        """At a meeting: steps since this was last asked, and how stale they were. On rank 0 of all
        workers, on others of this one."""
        counts = Counter(self.staleness) if dist.get_rank() else self._server.staleness.copy()
        self.staleness.clear()
        self._server.staleness.clear()
        num_steps = counts.total()
        return {
            "num_steps": num_steps,
            "staleness_mean": sum(s * n for s, n in counts.items()) / max(1, num_steps),
            "staleness_max": max(counts, default=0),
        }

    def consolidated(self) -> AbstractContextManager[None]:
        return self._replica.averaged()

    def finish(self) -> None:
        """End the threads. The models have been equal since the last meeting."""
        if dist.get_rank() != 0 and self._has_begun:
            self._send(_END)
        for thread in self._threads:
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        """At a meeting."""
        return {"world_size": dist.get_world_size(), "own": self._replica.read()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["world_size"] == dist.get_world_size():
            self._replica.write(state["own"])

    def _open(self, start: int, stop: int) -> None:
        self._server.open(start, stop, flatten(self._parameters).cpu())
        if not self._threads:
            self._threads = [
                threading.Thread(
                    target=self._serve, args=(rank,), name=f"serve-{rank}", daemon=True
                )
                for rank in self._lines
            ]
            for thread in self._threads:
                thread.start()

    def _serve(self, rank: int) -> None:
        """Rank 0's side of the line to another rank, in a thread."""
        line = self._lines[rank]
        message = torch.empty(1, dtype=torch.int64)
        try:
            while True:
                dist.recv(message, rank, group=line)
                if message.item() == _END:
                    return
                change = None
                if message.item() == _STEP:
                    change = torch.empty_like(self._turn.parameters)
                    dist.recv(change, rank, group=line)
                turn = self._server.turn(rank, change)
                claim = _NO_CLAIM if turn.claim is None else turn.claim
                dist.send(torch.tensor([claim, turn.staleness]), rank, group=line)
                dist.send(turn.parameters, rank, group=line)
        except Exception as error:  # rank 0 raises it in its next turn
            self._server.abort(error)

    def _exchange(self, change: Tensor | None) -> None:
        """This rank's turn, at the server or over the line to it."""
        if dist.get_rank() == 0:
            self._turn = self._server.turn(0, change)
        else:
            line = self._lines[dist.get_rank()]
            self._send(_CLAIM if change is None else _STEP)
            if change is not None:
                dist.send(change, 0, group=line)
            answer = torch.empty(2, dtype=torch.int64)
            dist.recv(answer, 0, group=line)
            parameters = torch.empty_like(self._turn.parameters)
            dist.recv(parameters, 0, group=line)
            claim, staleness = answer.tolist()
            self._turn = Turn(parameters, None if claim == _NO_CLAIM else claim, staleness)
        scatter(self._turn.parameters, self._parameters)

    def _send(self, message: int) -> None:
        dist.send(torch.tensor([message]), 0, group=self._lines[dist.get_rank()])

    def _meet(self) -> None:
        """All steps of the claims are in: every rank takes the parameters that came of them."""
        last = (
            self._server.turn(0, None).parameters if dist.get_rank() == 0 else self._turn.parameters
        )
        dist.broadcast(last, 0, group=self._all)
        scatter(last, self._parameters)
        self._replica.average_buffers()
