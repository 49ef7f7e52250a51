"""The replicas that make the next step together: who they are, and how they exchange tensors.

torchft's lighthouse says before each step which replicas take part; those that are behind take the
state of one that is not. The tensors go through a gloo group that is made anew whenever the answer
is another one. torchft's own manager is not used: it serves the state by an open HTTP server, and
its groups wait for a dead link until a timeout, where here the supervisor's word ends the wait.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torchft._torchft import ManagerClient
from torchft.coordination import ManagerServer

from training.errors import PeerLost
from training.hot_order import ReplicaOrder, read_given_up

_log = logging.getLogger(__name__)

_BEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=10)
_QUORUM = timedelta(hours=24)
"""A replica that is late is waited for: the supervisor finds those that hang."""
_LOOK = timedelta(milliseconds=50)
_AGAIN_SECONDS = 0.1

_T = TypeVar("_T")


class AttemptVoid(Exception):
    """A replica was lost in the middle: what was exchanged is of no use."""


@dataclass(frozen=True)
class Quorum:
    """Those who make the next step."""

    id: int
    rank: int
    """Of this replica among them."""
    replicas: tuple[int, ...]
    """Their numbers, by rank."""
    lives: frozenset[int]

    @property
    def size(self) -> int:
        return len(self.replicas)


class Peers:
    """This replica's way to the others.

    send_state: gives the tensors and the words that another one goes on from. take_state: the
    tensors to be filled, and what is called with the words when they are.
    """

    def __init__(self, order: ReplicaOrder, directory: Path, patience_seconds: float) -> None:
        """Its server says from here on that this replica is there, and the others wait for it."""
        self._order = order
        self._directory = directory
        self._timeout = timedelta(seconds=patience_seconds)
        store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        self._server = ManagerServer(
            replica_id=f"{order.number:04d}-{order.life}",
            lighthouse_addr=f"http://{order.lighthouse}",
            hostname=order.address,
            bind=f"{order.address}:0",
            store_addr=store,
            world_size=1,
            heartbeat_interval=_BEAT,
            connect_timeout=_CONNECT,
            quorum_retries=0,
        )
        self._client = ManagerClient(self._server.address(), connect_timeout=_CONNECT)
        self._quorum: Quorum | None = None
        self._group: Any = None
        self._num_void = 0
        """Attempts one after another that came to nothing."""
        self._stuck: list[Any] = []
        """Groups whose last exchange waits for ever: to let go of one would wait too."""

    @property
    def quorum(self) -> Quorum:
        assert self._quorum
        return self._quorum

    def found(self) -> None:
        """Wait for all others that this world begins with."""
        host, _, port = self._order.meeting.rpartition(":")
        store = TCPStore(host, int(port), is_master=False)
        key = f"{self._order.world}/founders"
        store.add(key, 1)
        while store.add(key, 0) < self._order.num_founders:
            time.sleep(0.02)

    def meet(
        self,
        step: int,
        read_state: Callable[[], tuple[Sequence[Tensor], Mapping[str, Any]]],
        take_state: Callable[[], Sequence[Tensor]],
    ) -> Mapping[str, Any] | None:
        """Wait until those who make the next step are known and connected. step: how many this
        replica has done. Where it is behind, `take_state` gives the tensors that a peer's are
        written into, and the peer's words are given; else None.

        Raises PeerLost when the state did not come whole.
        """
        while True:
            try:
                return self._meet(step, read_state, take_state)
            except AttemptVoid:
                self.void()

    def sum(self, tensor: Tensor) -> None:
        """Add up in place over the quorum, the same bits in each. Raises AttemptVoid."""
        if self.quorum.size > 1:
            self._exchange(lambda group: group.allreduce([tensor]))

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all, by rank. Raises AttemptVoid."""
        rows = [torch.empty_like(row) for _ in range(self.quorum.size)]
        if self.quorum.size == 1:
            return row[None]
        self._exchange(lambda group: group.allgather([rows], [row]))
        return torch.stack(rows)

    def spread(self, tensor: Tensor) -> None:
        """Replace by that of rank 0. Raises AttemptVoid."""
        if self.quorum.size > 1:
            self._exchange(lambda group: group.broadcast(tensor, 0))

    def void(self) -> None:
        """This attempt has come to nothing: there will be another group for the next one."""
        self._num_void += 1
        self._group = None

    def commit(self) -> None:
        """The step is done."""
        self._num_void = 0

    def close(self) -> None:
        """Leave."""
        self._server.shutdown()
        self._group = None

    def _meet(
        self,
        step: int,
        read_state: Callable[[], tuple[Sequence[Tensor], Mapping[str, Any]]],
        take_state: Callable[[], Sequence[Tensor]],
    ) -> Mapping[str, Any] | None:
        said = self._ask(step)
        if said.max_step < (self._order.least_step or 0):
            raise PeerLost(
                f"those that are there have done {said.max_step} steps, and others had done "
                f"{self._order.least_step}"
            )
        names = [name.split("-") for name in said.replica_ids]
        quorum = Quorum(
            id=said.quorum_id,
            rank=said.replica_rank,
            replicas=tuple(int(number) for number, _ in names),
            lives=frozenset(int(life) for _, life in names),
        )
        if self._quorum is None or quorum.id != self._quorum.id or self._group is None:
            self._quorum, self._group = quorum, None
            self._connect(said.store_address)
        for rank in said.recover_dst_replica_ranks:
            self._send_state(rank, *read_state())
        if not said.heal:
            return None
        try:
            return self._receive_state(said.recover_src_replica_rank, take_state())
        except AttemptVoid:
            raise PeerLost("the replica that the state came from was lost") from None

    def _ask(self, step: int) -> Any:
        while True:
            try:
                return self._client._quorum(
                    group_rank=0,
                    step=step,
                    checkpoint_metadata="",
                    shrink_only=False,
                    timeout=_QUORUM,
                    commit_failures=self._num_void,
                    init_sync=False,
                )
            except (RuntimeError, TimeoutError) as error:
                _log.warning("no quorum: %s", error)
                time.sleep(_AGAIN_SECONDS)

    def _connect(self, address: str) -> None:
        """Make the group of the quorum. A peer that dies meanwhile would be waited for."""
        quorum = self.quorum
        host, _, port = address.rpartition(":")

        def connect() -> dist.ProcessGroupGloo:
            store = TCPStore(host, int(port), is_master=False, timeout=self._timeout)
            named = PrefixStore(f"quorum-{quorum.id}", store)
            return dist.ProcessGroupGloo(named, quorum.rank, quorum.size, self._timeout)

        if quorum.size > 1:
            self._group = self._beside(connect)

    def _send_state(self, rank: int, tensors: Sequence[Tensor], words: Mapping[str, Any]) -> None:
        group, said = self._group, _encode(words)
        assert group

        def send() -> None:
            for tensor in (torch.tensor([len(said)]), said, *tensors):
                group.send([tensor.cpu().contiguous()], rank, 0).wait()

        self._beside(send)

    def _receive_state(self, rank: int, tensors: Sequence[Tensor]) -> Mapping[str, Any]:
        group = self._group
        assert group

        def receive(tensor: Tensor) -> Tensor:
            came = torch.empty_like(tensor, device="cpu")
            group.recv([came], rank, 0).wait()
            tensor.copy_(came)
            return tensor

        def receive_all() -> Tensor:
            size = int(receive(torch.zeros(1, dtype=torch.int64)))
            said = receive(torch.empty(size, dtype=torch.uint8))
            for tensor in tensors:
                receive(tensor)
            return said

        words: Mapping[str, Any] = json.loads(self._beside(receive_all).numpy().tobytes())
        return words

    def _beside(self, call: Callable[[], _T]) -> _T:
        """Call in a thread: what waits for one that is lost can be left there. gloo would else
        wait for its timeout, and a wait for one tensor that is given up breaks the group."""
        made: list[_T] = []

        def run() -> None:
            with suppress(RuntimeError):  # what a lost peer raises
                made.append(call())

        thread = threading.Thread(target=run, name="peers", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK.total_seconds())
            if thread.is_alive() and self._has_lost():
                self._stuck.append(self._group)
                raise AttemptVoid
        if not made:
            raise AttemptVoid
        return made[0]

    def _exchange(self, begin: Callable[[Any], Any]) -> None:
        try:
            work = begin(self._group)
        except RuntimeError:
            raise AttemptVoid from None
        while True:
            is_over = work.is_completed()
            try:
                work.wait(_LOOK)
                return
            except RuntimeError:
                if is_over:
                    raise AttemptVoid from None
            if self._has_lost():
                self._stuck.append((self._group, work))
                raise AttemptVoid

    def _has_lost(self) -> bool:
        return not self.quorum.lives.isdisjoint(read_given_up(self._directory))


def _encode(words: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)
