"""Does to the nodes of a run what a scenario says, and what is commanded meanwhile."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from training.account import Account
from training.checkpoint_commit import CHECKPOINTS
from training.cluster import LocalCluster
from training.errors import CannotSimulate, NetworkUnavailable
from training.heartbeat import read_beats
from training.network import NamespaceNetwork, Network
from training.process import find_descendants
from training.scenario import Fault, Scenario
from training.surroundings import (
    Clocks,
    Disk,
    find_clock_library,
    find_mount_problem,
    see_mounts,
)

COMMANDS_FILE = "commands.jsonl"
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class _Stage:
    """The run that is simulated."""

    cluster: LocalCluster
    network: Network
    account: Account
    run_directory: Path


class Simulation:
    """The faults of one run. The supervisor calls `act` ten times a second.

    Commands are JSON lines in a file, each with an `id` and a `fault`; answers, in another one,
    have the `id` and either `done` or `failed`.
    """

    def __init__(self, scenario: Scenario, directory: Path, num_nodes: int) -> None:
        self._scenario = scenario
        self._directory = directory
        self._num_nodes = num_nodes
        self._left = list(scenario.faults)
        self._undoings: list[tuple[float, Callable[[], None]]] = []
        self._num_read = 0
        self._stage: _Stage | None = None
        self._disk: Disk | None = None
        self._clocks: Clocks | None = None
        self._no_clocks = ""
        self.happened: list[Fault] = []
        """What was done, and when."""

    @property
    def left(self) -> tuple[Fault, ...]:
        """Faults of the scenario whose time has not come."""
        return tuple(self._left)

    def prepare(self, run_directory: Path, account: Account) -> None:
        """Before the nodes are started: see what can be had, and say what cannot."""
        disk = run_directory / CHECKPOINTS
        disk.mkdir(parents=True, exist_ok=True)
        problem = find_mount_problem(disk)
        if problem is None:
            library, self._no_clocks = find_clock_library(self._directory / "clocks")
            if library:
                self._clocks = Clocks(self._directory / "clocks", library)
            if self._scenario.disk_mib:
                self._disk = Disk(disk, self._scenario.disk_mib)
        else:
            self._no_clocks = problem
            account.tell("not_simulated", f"nodes have no disks and clocks of their own: {problem}")

    def surround(self, node: int) -> tuple[str, ...]:
        """What is put before the command of the node's process."""
        own = [one.mount for one in (self._disk, self._clocks) if one]
        clock = self._clocks.prefix(node) if self._clocks else ()
        return (*see_mounts(own), *clock)

    def begin(
        self, cluster: LocalCluster, network: Network, account: Account, run_directory: Path
    ) -> None:
        """The nodes are being started: this is them."""
        self._stage = _Stage(cluster, network, account, run_directory)

    def act(self) -> None:
        """Do what is due, undo what is over, and follow commands."""
        assert self._stage
        account, now = self._stage.account, time.monotonic()
        for at, undo in [one for one in self._undoings if one[0] <= now]:
            self._undoings.remove((at, undo))
            undo()
        for fault in list(self._left):
            by_step = fault.step is not None and account.step >= fault.step
            by_time = fault.second is not None and account.seconds >= fault.second
            if by_step or by_time:
                self._left.remove(fault)
                with suppress(CannotSimulate):  # it has said so
                    self._do(fault)
        self._follow_commands()

    def _do(self, fault: Fault) -> None:
        """Raises CannotSimulate, which it has told of."""
        assert self._stage
        account = self._stage.account
        try:
            undo = self._inflict(fault)
        except (CannotSimulate, NetworkUnavailable) as error:
            account.tell("not_simulated", f"that {fault}: {error}", node=fault.node)
            raise CannotSimulate(str(error)) from None
        if fault.for_seconds:
            self._undoings.append((time.monotonic() + fault.for_seconds, undo))
        second = None if account.step else round(account.seconds, 1)
        when = {"step": account.step or None, "second": second}
        self.happened.append(fault.model_copy(update=when))
        account.tell("fault", f"simulated: {fault}", node=fault.node, rank=fault.rank)

    def _inflict(self, fault: Fault) -> Callable[[], None]:
        """Do it; gives what undoes it."""
        node = -1 if fault.node is None else fault.node
        match fault.fault:
            case "kill":
                return self._signal(fault, signal.SIGKILL, whole=False)
            case "stop":
                return self._signal(fault, signal.SIGSTOP, whole=True)
            case "cut":
                links = self._links
                links.cut(node)
                return lambda: links.join(node)
            case "slow":
                links = self._links
                links.limit(node, fault.rate_mbit)
                return lambda: links.limit(node, None)
            case "fill":
                return self._fill(node)
            case "clock":
                if self._clocks is None:
                    raise CannotSimulate(self._no_clocks)
                self._clocks.move(node, fault.move_seconds or 0.0)
                return lambda: self._set_clock_right(node)
            case "mend":
                self._mend(node)
                return lambda: None

    def _signal(self, fault: Fault, number: signal.Signals, whole: bool) -> Callable[[], None]:
        assert self._stage
        if fault.rank is not None:
            beats = read_beats(self._stage.run_directory)
            pids = [beat.pid for beat in beats if beat.rank == fault.rank]
            if not pids:
                raise CannotSimulate(f"rank {fault.rank} is not there now")
        else:
            pids = [self._pid(fault.node or 0)]
            # The kernel ends the others with it, but stops none.
            pids += find_descendants(pids[0]) if whole else []
        _send(pids, number)
        return lambda: _send(pids, signal.SIGCONT)

    def _fill(self, node: int) -> Callable[[], None]:
        disk = self._disk
        if disk is None:
            raise CannotSimulate(
                "the node has no disk of its own: the scenario's disk_mib makes it"
            )
        pid = self._pid(node)
        disk.fill(pid)

        def empty() -> None:
            with suppress(FileNotFoundError):  # gone with its node
                disk.empty(pid)

        return empty

    def _mend(self, node: int) -> None:
        assert self._stage
        if isinstance(self._stage.network, NamespaceNetwork):
            self._stage.network.join(node)
            self._stage.network.limit(node, None)
        self._set_clock_right(node)
        pid = self._stage.cluster.find_pid(node)
        if pid is not None:
            _send([pid, *find_descendants(pid)], signal.SIGCONT)
            if self._disk:
                self._disk.empty(pid)

    def _set_clock_right(self, node: int) -> None:
        if self._clocks:
            self._clocks.move(node, 0.0)

    @property
    def _links(self) -> NamespaceNetwork:
        assert self._stage
        if not isinstance(self._stage.network, NamespaceNetwork):
            raise CannotSimulate(
                "the nodes share this machine's loopback device: train.network.namespaces makes "
                "links, where it can"
            )
        return self._stage.network

    def _pid(self, node: int) -> int:
        assert self._stage
        pid = self._stage.cluster.find_pid(node)
        if pid is None:
            raise CannotSimulate(f"node {node} was lost, and is not back yet")
        return pid

    def _follow_commands(self) -> None:
        try:
            with (self._directory / COMMANDS_FILE).open("rb") as file:
                file.seek(self._num_read)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._num_read += len(whole)
        for line in whole.splitlines():
            command = json.loads(line)
            with (self._directory / ANSWERS_FILE).open("a") as file:
                file.write(json.dumps({"id": command["id"], **self._obey(command)}) + "\n")

    def _obey(self, command: dict[str, object]) -> dict[str, str]:
        try:
            fault = Fault.model_validate(command["fault"])
            if fault.node is not None and fault.node >= self._num_nodes:
                numbers = ", ".join(map(str, range(self._num_nodes)))
                raise CannotSimulate(f"there is no node {fault.node}: there are {numbers}")
            self._do(fault)
        except ValidationError as error:
            return {"failed": error.errors()[0]["msg"].removeprefix("Value error, ")}
        except CannotSimulate as error:
            return {"failed": str(error)}
        return {"done": str(fault)}


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
