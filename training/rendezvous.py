"""The store at which the nodes of a world meet, in a process that is on none of them."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from training.errors import WorkersFailed
from training.network import Network
from training.process import PARENT_VARIABLE, die_with_parent, read_parent, set_name

_START_SECONDS = 120.0


class Meeting:
    """Hosts the store, in a process that is started when it is first needed, and again when it has
    died or cannot be reached any more. Leaving the context ends it."""

    def __init__(self, network: Network, environment: Mapping[str, str]) -> None:
        self._network = network
        self._environment = environment
        self._prefix: Sequence[str] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = ""

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def require(self) -> str:
        """Where the store is, as host:port. Raises WorkersFailed when it does not start."""
        moved = self._prefix != self._network.meeting_prefix
        if moved or self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        return f"{self._network.meeting_address}:{self._port}"

    def close(self) -> None:
        """End the store."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self._prefix = self._network.meeting_prefix
        address = self._network.meeting_address
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "training.rendezvous", address],
            env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        self._port = self._process.stdout.readline().decode().strip() if ready else ""
        if not self._port:
            raise WorkersFailed(f"the rendezvous store did not start at {address}")


def main(address: str) -> None:
    """Host a store at a free port, say which, and wait to be ended."""
    die_with_parent(signal.SIGKILL, read_parent())
    set_name("convoy-meeting")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
