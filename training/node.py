"""`python -m training.node`: one node, as a process that has imported torch and waits for worlds.

A world that has to be started again costs a fork then, and no import. The supervisor writes orders
to standard input and reads reports from standard output, JSON lines both. Standard input that ends
means that the supervisor has: everything of the node ends with it.
"""

import faulthandler
import importlib
import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import IO, Any

from pydantic import BaseModel

from training.process import PARENT_VARIABLE, die_with_parent, read_parent, set_name

PRELOAD_VARIABLE = "CONVOY_PRELOAD"
"""Environment variable with further modules to load."""
# What the workers would load one by one, each for itself. The optimisers load torch._dynamo.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict_loader",
    "training.agent",
    "training.scoring",
    "training.trainer",
    "training.worker",
)


class WorldOrder(BaseModel, frozen=True, extra="forbid"):
    """What a node is to run of a world."""

    name: str
    """Of the world: unlike that of any other, so that none meets what another left."""
    num_nodes: int
    node_rank: int
    workers_per_node: int
    address: str
    """Of this node, for its peers."""
    rendezvous: str
    """host:port of the store at which the nodes of the world meet; empty for a node alone."""
    worker: str
    """The module that each rank runs."""
    spec: str
    """The file that tells it what to do."""
    log_directory: str
    environment: dict[str, str] = {}
    """Variables of its own."""


class WorldEnd(BaseModel, frozen=True, extra="forbid"):
    """How a node's part of a world ended."""

    name: str
    finished: bool
    exit_codes: dict[int, int]
    """Of the workers that failed, by rank, negative for a signal; empty when the agent itself was
    killed."""


class _Agent:
    """The forked process that runs torchrun's agent, and what it leaves on its pipe."""

    def __init__(self, order: WorldOrder) -> None:
        self.order = order
        self._pipe, sender = os.pipe()
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _become_agent(order, sender)
        os.close(sender)
        self.descriptor = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """End the agent and its workers, a stopped one too."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> WorldEnd:
        """Called once the agent has ended: wait until the last of its workers is gone."""
        self.kill()
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)
        # Every worker holds the pipe's other end: it is at its end when all of them are gone.
        with os.fdopen(self._pipe, "rb") as pipe:
            said = pipe.read()
        if not said:
            return WorldEnd(name=self.order.name, finished=False, exit_codes={})
        return WorldEnd.model_validate_json(said)


def _become_agent(order: WorldOrder, sender: int) -> None:
    """Run the agent in the forked process, which never returns from here."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent(signal.SIGKILL, read_parent())
        set_name("convoy-agent")
        os.environ.update(order.environment)
        from training.agent import run_agent

        os.write(sender, run_agent(order).model_dump_json().encode())
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(orders: IO[bytes], reports: IO[bytes]) -> None:
    """Run the worlds that are ordered, or end those that are named, until the orders end."""
    agents: list[_Agent] = []
    while True:
        watched: list[Any] = [orders, *(agent.descriptor for agent in agents)]
        ready, _, _ = select.select(watched, [], [])
        for agent in [one for one in agents if one.descriptor in ready]:
            _report(reports, agent.end().model_dump_json())
            agents.remove(agent)
        if orders in ready:
            line = orders.readline()
            if not line:
                break
            order = json.loads(line)
            if isinstance(order, dict):
                agents.append(_Agent(WorldOrder.model_validate(order)))
            for agent in agents:
                if agent.order.name == order:
                    agent.kill()
    for agent in agents:
        agent.kill()
    for agent in agents:
        agent.end()


def _report(reports: IO[bytes], line: str) -> None:
    reports.write(line.encode() + b"\n")
    reports.flush()


def main() -> None:
    """Load what workers need, say so, and serve."""
    die_with_parent(signal.SIGKILL, read_parent())
    set_name("convoy-node")
    faulthandler.register(signal.SIGUSR1)  # for whoever wants to know what it waits for
    # Standard output is for reports; whatever prints goes where errors go.
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for name in (*_PRELOADED, *filter(None, os.environ.get(PRELOAD_VARIABLE, "").split())):
        importlib.import_module(name)
    # pyarrow is left out: its allocator starts a thread, and a process with threads is not safely
    # forked.
    importlib.import_module("storage.sealed").load_ciphers()
    _report(reports, json.dumps({"ready": os.getpid()}))
    serve(os.fdopen(0, "rb", buffering=0), reports)


if __name__ == "__main__":
    main()
