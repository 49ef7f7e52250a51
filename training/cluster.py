"""The nodes of a run on this machine: a warm process each, kept from world to world."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from training.network import Network
from training.node import WorldEnd, WorldOrder
from training.process import PARENT_VARIABLE
from training.recovery_config import RecoveryConfig

RUN_VARIABLE = "CONVOY_RUN"
"""Environment variable with the run's directory: every process of a run is found by it."""


@dataclass(frozen=True)
class NodeEvent:
    """What became of a node."""

    node: int
    end: WorldEnd | None
    """How its part of the world ended; None: the node itself is gone."""


class _Node:
    def __init__(
        self,
        prefix: Sequence[str],
        root: Path,
        environment: Mapping[str, str],
        log: Path,
        was_lost: bool,
    ) -> None:
        self.was_lost = was_lost
        """Whether it takes the place of one that was lost, and is not ready yet."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "training.node"],
                cwd=root,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                process_group=0,
            )
        self.is_ready = False
        self.worlds: set[str] = set()
        """What it runs: one, or a replica each of the same."""
        self._rest = b""

    @property
    def descriptor(self) -> int:
        assert self.process.stdout
        return self.process.stdout.fileno()

    def send(self, order: WorldOrder | str) -> None:
        """Have it run this, or end what it runs under this name."""
        assert self.process.stdin
        line = json.dumps(order) if isinstance(order, str) else order.model_dump_json()
        with suppress(BrokenPipeError):  # then its reports end too, and it counts as lost
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def read(self) -> list[bytes] | None:
        """Whole lines that came; None when the node is gone."""
        content = os.read(self.descriptor, 1 << 16)
        if not content:
            return None
        *lines, self._rest = (self._rest + content).split(b"\n")
        return lines

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class LocalCluster:
    """Nodes of this machine. Leaving the context ends all of them, whatever they do.

    The place of a lost node stays empty for a time, which doubles with every loss of it.
    """

    def __init__(
        self,
        num_nodes: int,
        root: Path,
        environment: Mapping[str, str],
        log_directory: Path,
        recovery: RecoveryConfig,
        network: Network,
        surround: Callable[[int], Sequence[str]] | None = None,
    ) -> None:
        """surround: what goes before the command of each node's process."""
        log_directory.mkdir(parents=True, exist_ok=True)
        self._root = root
        self._environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
        self._logs = log_directory
        self._recovery = recovery
        self._network = network
        self._surround = surround or (lambda node: ())
        self._num_losses = [0] * num_nodes
        self._excluded: dict[int, float] = {}
        """Until when, by the monotonic clock."""
        self._nodes = {number: self._start_node(number) for number in range(num_nodes)}

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self._nodes.values():
            node.close()

    @property
    def ready(self) -> list[int]:
        """Nodes that have no world and can start one at once, in order."""
        return sorted(n for n, node in self._nodes.items() if node.is_ready and not node.worlds)

    def is_up(self, node: int) -> bool:
        """Whether a node can start something, whatever it runs already."""
        return node in self._nodes and self._nodes[node].is_ready

    @property
    def awaited(self) -> bool:
        """Whether a node that was never lost is still starting, or has not ended its world."""
        return any(
            not node.was_lost and not (node.is_ready and not node.worlds)
            for node in self._nodes.values()
        )

    def find_pid(self, node: int) -> int | None:
        """Of the node's process; None while its place is empty."""
        return self._nodes[node].process.pid if node in self._nodes else None

    def start(self, node: int, order: WorldOrder) -> None:
        """Have a node that is up run its part of a world."""
        self._nodes[node].worlds.add(order.name)
        self._nodes[node].send(order)

    def stop(self, nodes: Sequence[int], name: str | None = None) -> None:
        """End what these nodes run, or what is of this name, at once; ends are events like any
        other."""
        for node in (self._nodes[number] for number in nodes if number in self._nodes):
            for world in [name] if name else list(node.worlds):
                node.send(world)

    def kill(self, nodes: Sequence[int]) -> None:
        """End these nodes themselves: they are lost."""
        for number in nodes:
            if number in self._nodes:
                self._nodes[number].process.kill()

    def lose(self, node: int) -> None:
        """End a node that is no longer of use, as if it had been lost."""
        self._exclude(node)

    def admit(self, least: int) -> None:
        """End the exclusion of as many nodes as `least` lacks, those first whose time is over
        soonest."""
        for number in sorted(self._excluded, key=self._excluded.__getitem__):
            if len(self._nodes) >= least:
                break
            self._admit(number)

    def poll(self, seconds: float) -> list[NodeEvent]:
        """What happened to nodes, as soon as something did or after this time.

        A lost node is started again when its exclusion is over; it is ready some seconds later.
        """
        now = time.monotonic()
        for number in [n for n, until in self._excluded.items() if until <= now]:
            self._admit(number)
        by_descriptor = {node.descriptor: number for number, node in self._nodes.items()}
        ready, _, _ = select.select(list(by_descriptor), [], [], seconds)
        return [event for found in ready for event in self._read(by_descriptor[found])]

    def _read(self, number: int) -> Iterator[NodeEvent]:
        node = self._nodes[number]
        lines = node.read()
        if lines is None:
            self._exclude(number)
            yield NodeEvent(number, None)
            return
        for line in lines:
            said = json.loads(line)
            if "ready" in said:
                self._network.attach(number, node.process.pid)
                node.is_ready, node.was_lost = True, False
                continue
            end = WorldEnd.model_validate(said)
            node.worlds.discard(end.name)
            yield NodeEvent(number, end)

    def _exclude(self, number: int) -> None:
        self._nodes.pop(number).close()
        recovery = self._recovery
        seconds = recovery.exclude_seconds * 2.0 ** self._num_losses[number]
        self._num_losses[number] += 1
        self._excluded[number] = time.monotonic() + min(seconds, recovery.longest_exclude_seconds)

    def _admit(self, number: int) -> None:
        del self._excluded[number]
        self._nodes[number] = self._start_node(number, was_lost=True)

    def _start_node(self, number: int, was_lost: bool = False) -> _Node:
        return _Node(
            (*self._network.node_prefix, *self._surround(number)),
            self._root,
            self._environment,
            self._logs / f"node-{number}.log",
            was_lost,
        )


def reap(run_directory: Path) -> list[int]:
    """Kill every process that an earlier life of the run left, and give their numbers."""
    mark = f"{RUN_VARIABLE}={run_directory}".encode()
    left = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):  # gone meanwhile, or not ours to look at
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                left.append(int(entry.name))
    return left
