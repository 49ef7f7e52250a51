"""The servers of the tests: on loopback alone, and gone with whoever started them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.servers import OpenBao, SeaweedFS

_ROOT = Path(__file__).parents[2]


def test_nothing_listens_beyond_this_machine(s3_server: SeaweedFS, bao_server: OpenBao) -> None:
    servers = [child for child in psutil.Process().children() if child.name() in ("weed", "bao")]
    assert {server.name() for server in servers} >= {"weed", "bao"}
    listening = [
        connection.laddr.ip
        for server in servers
        for connection in server.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) == {"127.0.0.1"}


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_dies_with_its_starter(tmp_path: Path, signal_number: int) -> None:
    script = (
        "import sys, time, psutil\n"
        "from pathlib import Path\n"
        "from tests.servers import moto_server\n"
        "with moto_server(Path(sys.argv[1])):\n"
        "    print(psutil.Process().children()[0].pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    server = int(starter.stdout.readline())
    assert _is_alive(server)
    starter.send_signal(signal_number)
    starter.communicate()
    deadline = time.monotonic() + 20
    while _is_alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(server)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
