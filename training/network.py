"""How the nodes of a run on this machine reach one another."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from training.account import Account
from training.errors import NetworkUnavailable
from training.process import PARENT_VARIABLE
from training.spec import WorkerSpec
from training.switch import MOST_NODES, NODE_DEVICE, SWITCH_ADDRESS, node_address

_ANSWER_SECONDS = 30.0


class Network(Protocol):
    """What the supervisor asks of it."""

    meeting_address: str
    """Of the store at which the nodes meet."""
    meeting_prefix: Sequence[str]
    """Put before the command of that store's process."""
    node_prefix: Sequence[str]
    """Put before the command of a node's process."""
    device: str
    """Over which the workers speak."""

    def address(self, node: int) -> str:
        """Of a node, for its peers."""

    def attach(self, node: int, pid: int) -> None:
        """A node's process has begun."""

    def find_silent(self) -> dict[int, float]:
        """Seconds since each node last answered over the network, where it can be silent."""


class SharedNetwork:
    """All nodes are on this machine's loopback device."""

    meeting_address = "127.0.0.1"
    meeting_prefix: Sequence[str] = ()
    node_prefix: Sequence[str] = ()

    def __init__(self, device: str) -> None:
        self.device = device

    def address(self, node: int) -> str:
        return self.meeting_address

    def attach(self, node: int, pid: int) -> None:
        """Nothing: it is there already."""

    def find_silent(self) -> dict[int, float]:
        return {}


class NamespaceNetwork:
    """Each node has a network namespace of its own, tied to a bridge in another one, by a link that
    can be cut and slowed. Leaving the context ends it.

    The process that holds the bridge is started again when it has died, and all nodes are tied to
    the new one.
    """

    meeting_address = SWITCH_ADDRESS
    node_prefix: Sequence[str] = ("unshare", "--net")
    device = NODE_DEVICE

    def __init__(
        self, num_nodes: int, environment: Mapping[str, str], rate_mbit: float | None = None
    ) -> None:
        """Raises NetworkUnavailable where the tools or the right to use them are missing."""
        if num_nodes > MOST_NODES:
            raise NetworkUnavailable(f"more than {MOST_NODES} nodes")
        self._environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
        self._usual_mbit = rate_mbit or 0.0
        self._pids: dict[int, int] = {}
        self._mbit: dict[int, float] = {}
        self._cut: set[int] = set()
        self._process = self._start()

    def __enter__(self) -> "NamespaceNetwork":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process that holds the bridge."""
        self._process.kill()
        self._process.communicate()

    def address(self, node: int) -> str:
        return node_address(node)

    def attach(self, node: int, pid: int) -> None:
        self._pids[node] = pid
        mbit = self._mbit.get(node, self._usual_mbit)
        self._ask("attach", node, pid, mbit, node in self._cut)

    def find_silent(self) -> dict[int, float]:
        return {int(node): seconds for node, seconds in self._ask("silent").items()}

    def cut(self, node: int) -> None:
        """Take a node's link down."""
        self._cut.add(node)
        self._ask("cut", node)

    def join(self, node: int) -> None:
        """Take a node's link up again."""
        self._cut.discard(node)
        self._ask("join", node)

    def limit(self, node: int, mbit: float | None) -> None:
        """Let so many megabits a second through to and from a node; None for what it had."""
        self._mbit[node] = self._usual_mbit if mbit is None else mbit
        self._ask("limit", node, self._pids[node], self._mbit[node])

    def _ask(self, *request: Any) -> Any:
        try:
            return _ask(self._process, request)
        except BrokenPipeError:
            self.close()
            self._process = self._start()
            for node, pid in self._pids.items():
                if Path(f"/proc/{pid}").exists():
                    self.attach(node, pid)
            return _ask(self._process, request)

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            process = subprocess.Popen(
                ["unshare", "--net", sys.executable, "-m", "training.switch"],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
        except FileNotFoundError:
            raise NetworkUnavailable("`unshare` of util-linux is not installed") from None
        try:
            pid = _read(process)
        except BrokenPipeError:
            _, said = process.communicate()
            lines = said.decode(errors="replace").strip().splitlines()
            raise NetworkUnavailable(lines[-1] if lines else "its process has ended") from None
        except NetworkUnavailable:
            process.kill()
            process.communicate()
            raise
        self.meeting_prefix: Sequence[str] = ("nsenter", "--net", "--target", str(pid))
        return process


def _ask(process: "subprocess.Popen[bytes]", request: Sequence[Any]) -> Any:
    """Raises BrokenPipeError when the process has ended, NetworkUnavailable when it cannot."""
    assert process.stdin
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    return _read(process)


def _read(process: "subprocess.Popen[bytes]") -> Any:
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], _ANSWER_SECONDS)
    if not ready:
        raise NetworkUnavailable(f"no answer from its process in {_ANSWER_SECONDS:.0f} s")
    line = process.stdout.readline()
    if not line:
        raise BrokenPipeError
    answer = json.loads(line)
    if "failed" in answer:
        raise NetworkUnavailable(answer["failed"])
    return answer["done"]


def open_network(
    spec: WorkerSpec, environment: Mapping[str, str], account: Account, stack: ExitStack
) -> Network:
    """What the config asks for, or else what can be had, and then a word of what is not."""
    if spec.network.namespaces:
        try:
            opened = NamespaceNetwork(spec.nodes, environment, spec.network.rate_mbit)
            return stack.enter_context(opened)
        except NetworkUnavailable as error:
            account.tell(
                "not_simulated",
                f"the nodes share this machine's loopback device, for no network namespaces can be "
                f"had ({error}): addresses of their own, and links that are limited, slow or cut, "
                "are not simulated. It takes iproute2, util-linux and root",
            )
    return SharedNetwork(environment.get("GLOO_SOCKET_IFNAME", "lo"))
