"""Nodes with network namespaces of their own: they reach one another, over links that can be cut
and slowed, and nothing of it outlives the processes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.training.test_kill import wait_until
from training.errors import NetworkUnavailable
from training.network import NamespaceNetwork

_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9000), timeout=20) as peer:
    began = time.monotonic()
    peer.sendall(bytes(int(sys.argv[2])))
    peer.shutdown(socket.SHUT_WR)
    assert peer.recv(1) == b"."
    print(time.monotonic() - began)
"""
_TAKE = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    while True:
        peer, _ = server.accept()
        while peer.recv(1 << 16):
            pass
        peer.sendall(b".")
        peer.close()
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1"}


@pytest.fixture
def network() -> Iterator[NamespaceNetwork]:
    try:
        opened = NamespaceNetwork(2, _environment())
    except NetworkUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    with opened:
        yield opened


@pytest.fixture
def nodes(network: NamespaceNetwork) -> Iterator[list[subprocess.Popen[str]]]:
    started = [
        subprocess.Popen([*network.node_prefix, sys.executable, "-c", _TAKE], text=True)
        for _ in range(2)
    ]
    own = os.readlink("/proc/self/ns/net")
    for number, node in enumerate(started):
        inside = f"/proc/{node.pid}/ns/net"
        while os.readlink(inside) == own:
            time.sleep(0.01)
        network.attach(number, node.pid)
    yield started
    for node in started:
        node.kill()
        node.wait()


def _send(node: subprocess.Popen[str], address: str, num_bytes: int) -> float:
    inside = ["nsenter", "--net", "--target", str(node.pid), sys.executable, "-c", _SEND]
    done = subprocess.run(
        [*inside, address, str(num_bytes)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def test_links_are_cut_slowed_and_gone(
    network: NamespaceNetwork, nodes: list[subprocess.Popen[str]]
) -> None:
    before = {name for _, name in socket.if_nameindex()}
    assert network.find_silent().keys() == {0, 1}
    assert _send(nodes[0], network.address(1), 1_000_000) < 1.0
    network.limit(1, 8.0)  # a megabyte a second, after what may come at once
    assert _send(nodes[0], network.address(1), 1_000_000) > 0.5
    network.limit(1, None)
    assert _send(nodes[0], network.address(1), 1_000_000) < 0.5
    network.cut(1)
    wait_until(lambda: network.find_silent()[1] > 2.0, 10)
    assert network.find_silent()[0] < 2.0
    network.join(1)
    wait_until(lambda: network.find_silent()[1] < 1.0, 10)
    # The process that holds the bridge may die too.
    [switch] = [p for p in psutil.Process().children() if p.name() == "convoy-switch"]
    switch.kill()
    assert network.find_silent().keys() == {0, 1}
    assert _send(nodes[0], network.address(1), 1_000_000) < 1.0
    assert before == {name for _, name in socket.if_nameindex()}  # nothing is in this namespace


def test_without_the_right_it_says_so() -> None:
    with pytest.raises(NetworkUnavailable, match="not installed"):
        NamespaceNetwork(2, _environment() | {"PATH": "/nonexistent"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a right to give away")
def test_without_the_right_to_make_devices_it_says_so() -> None:
    code = "import os; from training.network import *; NamespaceNetwork(2, dict(os.environ))"
    fewer = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps=-all"]
    done = subprocess.run(
        [*fewer, sys.executable, "-c", code], env=_environment(), capture_output=True, text=True
    )
    assert "NetworkUnavailable: `ip link set lo up`: " in done.stderr
    assert "Operation not permitted" in done.stderr
