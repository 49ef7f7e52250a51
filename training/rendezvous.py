"""The store at which the nodes of a world meet, in a process that is on none of them."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from training.errors import WorkersFailed
from training.process import PARENT_VARIABLE, die_with_parent, read_parent, set_name

_START_SECONDS = 120.0


@contextlib.contextmanager
def host_rendezvous(
    address: str, environment: Mapping[str, str], prefix: Sequence[str] = ()
) -> Iterator[str]:
    """A store at this address, as host:port, as long as the context; `prefix` goes before the
    command of its process. Raises WorkersFailed."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "training.rendezvous", address],
        env={**environment, PARENT_VARIABLE: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        process_group=0,
    )
    assert process.stdout
    with process.stdout as output:
        try:
            ready, _, _ = select.select([output], [], [], _START_SECONDS)
            port = output.readline().strip() if ready else b""
            if not port:
                raise WorkersFailed(f"the rendezvous store did not start at {address}")
            yield f"{address}:{port.decode()}"
        finally:
            process.kill()
            process.wait()


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
