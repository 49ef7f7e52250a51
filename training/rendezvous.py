"""The store at which the nodes of a world meet, in a process that is on none of them; and, where
replicas come and go, the lighthouse (torchft) that says which of them make the next step.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType

from training.activity import read_state
from training.errors import WorkersFailed
from training.network import Network
from training.process import PARENT_VARIABLE, die_with_parent, read_parent, set_name

_START_SECONDS = 120.0
_BEAT_MILLISECONDS = 600
"""A replica that has not been heard of for so long makes no part of the next step."""
_JOIN_MILLISECONDS = 24 * 3_600_000
"""A replica that is heard of and late is waited for: the supervisor finds those that hang."""
_TICK_MILLISECONDS = 20


class Meeting:
    """Hosts the store, in a process that is started when it is first needed, and again when it has
    died or cannot be reached any more. Leaving the context ends it."""

    def __init__(
        self, network: Network, environment: Mapping[str, str], least_replicas: int | None = None
    ) -> None:
        """least_replicas: that a lighthouse lets go on; None has no lighthouse."""
        self._network = network
        self._least_replicas = least_replicas
        self._environment = environment
        self._prefix: Sequence[str] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._port = self._lighthouse_port = ""

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
        if not self.is_there:
            self.close()
            self._start()
        return f"{self._network.meeting_address}:{self._port}"

    @property
    def lighthouse(self) -> str:
        """Where the lighthouse is, as host:port, once `require` has said where the store is."""
        return f"{self._network.meeting_address}:{self._lighthouse_port}"

    @property
    def is_there(self) -> bool:
        """Whether its process runs, and can be reached."""
        moved = self._prefix != self._network.meeting_prefix
        return not moved and self._process is not None and self._process.poll() is None

    @property
    def is_stopped(self) -> bool:
        """Whether its process is there and answers nobody."""
        return self._process is not None and read_state(self._process.pid) == "T"

    def close(self) -> None:
        """End the store."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self._prefix = self._network.meeting_prefix
        address = self._network.meeting_address
        least = [] if self._least_replicas is None else [str(self._least_replicas)]
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "training.rendezvous", address, *least],
            env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], _START_SECONDS)
        said = self._process.stdout.readline().decode().split() if ready else []
        self._port, self._lighthouse_port = [*said, "", ""][:2]
        if not self._port:
            raise WorkersFailed(f"the rendezvous store did not start at {address}")


def main(address: str, least_replicas: str = "") -> None:
    """Host a store at a free port, and a lighthouse if asked; say which, and wait to be ended."""
    die_with_parent(signal.SIGKILL, read_parent())
    set_name("convoy-meeting")
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    ports = [store.port]
    if least_replicas:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(
            bind=f"{address}:0",
            min_replicas=int(least_replicas),
            join_timeout_ms=_JOIN_MILLISECONDS,
            quorum_tick_ms=_TICK_MILLISECONDS,
            heartbeat_timeout_ms=_BEAT_MILLISECONDS,
        )
        ports.append(lighthouse.address().rpartition(":")[2])
    print(*ports, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
