"""torchrun's agent for one node of one world, in this process, its workers forked from it."""

import os
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from training.node import WorldEnd, WorldOrder
from training.process import PARENT_VARIABLE
from training.rank import run_rank

_LOOK_SECONDS = 1.0
"""After which the agent looks at its workers where none of them has ended."""
_SHUTDOWN_SECONDS = 5
"""After which workers that were told to end are killed."""


class AppointedRendezvous(RendezvousHandler):
    """The nodes of a world, as the supervisor has appointed them: nobody else can join or is waited
    for, and there is nothing to agree on, which takes torchrun's own way a second or more."""

    def __init__(self, order: WorldOrder) -> None:
        self._order = order

    @property
    def use_agent_store(self) -> bool:
        return False  # restarted workers can meet the addresses of the dead ones in it

    def get_backend(self) -> str:
        return "appointed"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet at the supervisor's store, or, alone, at one of this process."""
        order = self._order
        store: Store = HashStore()
        if order.rendezvous:
            host, _, port = order.rendezvous.rpartition(":")
            store = TCPStore(host, int(port), is_master=False)
        store = PrefixStore(order.name, store)
        peers = RendezvousStoreInfo.build(order.node_rank, store, order.address)
        return RendezvousInfo(store, order.node_rank, order.num_nodes, peers)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass  # the supervisor closes a world by ending its agents

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._order.name

    def shutdown(self) -> bool:
        return True


class _PromptAgent(LocalElasticAgent):
    """Wakes when a worker ends, where torchrun's own looks many times a second."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = _list_processes(self)
        if all(one.exitcode is None for one in processes):
            # A worker that is done says so in its queue, and waits until that is read.
            context: Any = self._pcontext
            done = [queue._reader for queue in context._ret_vals.values()]
            wait([*(one.sentinel for one in processes), *done], _LOOK_SECONDS)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


def run_agent(order: WorldOrder) -> WorldEnd:
    """Run this node's workers to their end.

    What `torch.distributed.launcher` does, but that names only the first worker that was seen to
    have ended, which may be a peer of the one that was killed.
    """
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the workers
    agent = _PromptAgent(
        WorkerSpec(
            role="worker",
            local_world_size=order.workers_per_node,
            entrypoint=run_rank,
            args=(order.worker, order.spec),
            rdzv_handler=AppointedRendezvous(order),
            max_restarts=0,
            monitor_interval=0.001,  # it waits by itself
            local_addr=order.address,
        ),
        logs_specs=DefaultLogsSpecs(log_dir=order.log_directory, redirects=Std.ALL),
        # The node has imported torch: a worker need not.
        start_method="fork",
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    result = agent.run()
    if not result.is_failed():
        return WorldEnd(name=order.name, finished=True, exit_codes={})
    return WorldEnd(name=order.name, finished=False, exit_codes=_read_exit_codes(agent))


def _read_exit_codes(agent: LocalElasticAgent) -> dict[int, int]:
    workers = agent._worker_group.workers
    return {
        worker.global_rank: process.exitcode
        for worker, process in zip(workers, _list_processes(agent), strict=True)
        if process.exitcode
    }


def _list_processes(agent: LocalElasticAgent) -> list[BaseProcess]:
    # Private in torch 2.13: nothing public knows more than the first failure.
    context: Any = agent._pcontext
    return list(context._pc.processes)
