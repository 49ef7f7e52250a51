"""`python -m training.switch`: the network between nodes that have network namespaces of their own.

A process in a namespace that holds a bridge, to which each node is tied by a pair of virtual
devices. Nothing of it is in the machine's own namespace, and all of it is gone, by the kernel, with
the processes that are in there: whatever dies, no device and no namespace is left. Requests come as
JSON lines on standard input, answers leave on standard output.
"""

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from training.process import die_with_parent, read_parent, set_name

SWITCH_ADDRESS = "10.201.0.1"
NODE_DEVICE = "eth0"
"""What a node calls its end."""
MOST_NODES = 200
_BRIDGE = "switch"
_PROBE_SECONDS = 0.5
_PROBE_TIMEOUT_SECONDS = 2.0
_FIRST_ANSWER_SECONDS = 5.0
"""What a node that was tied to the bridge gets to answer, before it counts as silent."""
_FIRST_TIMEOUT_SECONDS = 0.3
"""Until then: what is sent while a link comes up is lost, and sent again a second later."""
_NEVER = 0.0
_UNSEEN_SECONDS = 0.3
_DISCARD = 9
"""A port at which nobody listens: an answer that says so is an answer."""
_BURST = ("burst", "256kb", "latency", "400ms")


def node_address(node: int) -> str:
    """Of a node, for its peers."""
    return f"10.201.0.{10 + node}"


class _Probe:
    """Finds out whether a node answers, by connections that it refuses, without ever waiting."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._begun = 0.0
        self.answered = _NEVER

    def look(self) -> None:
        now = time.monotonic()
        if self._socket is None:
            if self.answered == _NEVER or now - self._begun >= _PROBE_SECONDS:
                self._begin(now)
            return
        _, writable, _ = select.select([], [self._socket], [], 0)
        failure = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if writable else 0
        if failure == errno.ECONNREFUSED:
            self.answered = now
        has_answered = self.answered != _NEVER
        patience = _PROBE_TIMEOUT_SECONDS if has_answered else _FIRST_TIMEOUT_SECONDS
        if writable or now - self._begun > patience:
            self.close()

    def close(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def _begin(self, now: float) -> None:
        self._begun = now
        self._socket = socket.socket()
        self._socket.setblocking(False)
        code = self._socket.connect_ex((self._address, _DISCARD))
        if code == errno.ECONNREFUSED:
            self.answered = now
        if code != errno.EINPROGRESS:
            self.close()


class _Switch:
    def __init__(self) -> None:
        self._probes: dict[int, _Probe] = {}
        self._looked = time.monotonic()
        _call("ip", "link", "set", "lo", "up")
        _call("ip", "link", "add", _BRIDGE, "type", "bridge")
        _call("ip", "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", _BRIDGE)
        _call("ip", "link", "set", _BRIDGE, "up")

    def attach(self, node: int, pid: int, mbit: float, is_cut: bool) -> None:
        """Tie the namespace of this process to the bridge, as the node's."""
        port, inside = _port(node), _enter(pid)
        if port in {name for _, name in socket.if_nameindex()}:
            _call("ip", "link", "del", port)  # of the node that was lost
        if f" {NODE_DEVICE}@" in _call(*inside, "ip", "-o", "link"):
            _call(*inside, "ip", "link", "del", NODE_DEVICE)  # of the switch that was lost
        peer = ("peer", "name", NODE_DEVICE, "netns", str(pid))
        _call("ip", "link", "add", port, "type", "veth", *peer)
        _call("ip", "link", "set", port, "master", _BRIDGE)
        _call(*inside, "ip", "addr", "add", f"{node_address(node)}/24", "dev", NODE_DEVICE)
        _call(*inside, "ip", "link", "set", NODE_DEVICE, "up")
        _call(*inside, "ip", "link", "set", "lo", "up")
        self.limit(node, pid, mbit)
        if node in self._probes:
            self._probes[node].close()
        self._probes[node] = _Probe(node_address(node))
        if not is_cut:
            self.join(node)
            self._await_answer(node)

    def _await_answer(self, node: int) -> None:
        deadline = time.monotonic() + _FIRST_ANSWER_SECONDS
        while time.monotonic() < deadline:
            self.look()
            if self._probes[node].answered != _NEVER:
                return
            time.sleep(0.01)

    def cut(self, node: int) -> None:
        """Take the node's link down."""
        _call("ip", "link", "set", _port(node), "down")

    def join(self, node: int) -> None:
        """Take the node's link up."""
        _call("ip", "link", "set", _port(node), "up")

    def limit(self, node: int, pid: int, mbit: float) -> None:
        """Let so many megabits a second through in each direction; 0 for no limit."""
        for where, device in (((), _port(node)), (_enter(pid), NODE_DEVICE)):
            if mbit:
                rate = ("tbf", "rate", f"{round(mbit * 1e6)}bit", *_BURST)
                _call(*where, "tc", "qdisc", "replace", "dev", device, "root", *rate)
            elif "tbf" in _call(*where, "tc", "qdisc", "show", "dev", device):
                _call(*where, "tc", "qdisc", "del", "dev", device, "root")

    def silent(self) -> dict[str, float]:
        """Seconds since each node last answered."""
        self.look()
        now = time.monotonic()
        return {str(node): now - probe.answered for node, probe in self._probes.items()}

    def look(self) -> None:
        """Follow the probes. Time in which nobody looked counts against no node."""
        now = time.monotonic()
        unseen = now - self._looked if now - self._looked > _UNSEEN_SECONDS else 0.0
        self._looked = now
        for probe in self._probes.values():
            if probe.answered != _NEVER:
                probe.answered += unseen
            probe.look()


_VERBS: tuple[Callable[..., Any], ...] = (
    _Switch.attach,
    _Switch.cut,
    _Switch.join,
    _Switch.limit,
    _Switch.silent,
)


def _enter(pid: int) -> tuple[str, ...]:
    """Before a command that is to run in the network namespace of this process."""
    return ("nsenter", "--net", "--target", str(pid))


def _port(node: int) -> str:
    return f"node{node}"


def _call(*command: str) -> str:
    """Run a tool of iproute2 or util-linux. Raises CalledProcessError."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout


def _explain(error: subprocess.CalledProcessError | FileNotFoundError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"`{error.filename}` is not installed"
    said = (error.stderr or "").strip() or f"exit status {error.returncode}"
    return f"`{' '.join(error.cmd)}`: {said}"


def _answer(switch: _Switch, request: Sequence[Any]) -> dict[str, Any]:
    """What it gave, or why it could not."""
    verb, *arguments = request
    verbs = {one.__name__: one for one in _VERBS}
    try:
        return {"done": verbs[verb](switch, *arguments)}
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        return {"failed": _explain(error)}


def main() -> None:
    """Make the bridge, say so, and serve."""
    die_with_parent(signal.SIGKILL, read_parent())
    set_name("convoy-switch")
    try:
        switch = _Switch()
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        print(json.dumps({"failed": _explain(error)}), flush=True)
        return
    print(json.dumps({"done": os.getpid()}), flush=True)
    while True:
        ready, _, _ = select.select([0], [], [], 0.1)
        switch.look()
        if ready:
            line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
            if not line:
                return
            print(json.dumps(_answer(switch, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
