"""`python -m flows.guard PARENT ARGUMENTS...`: a Python module as a server that ends with PARENT.

A server that is killed alone leaves its children, and a parent that is killed cannot end its
servers. So this process stands between: the kernel ends it with its parent, and it then ends the
server's whole process group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

from training.process import die_with_parent

GRACE_SECONDS = 20.0
"""For the server: a served flow run first tells MLflow and Prefect how it ended."""
REST_SECONDS = 3.0
"""For what a server leaves behind, before SIGKILL."""

_AWAITED = {signal.SIGTERM, signal.SIGCHLD}


def main(arguments: list[str]) -> int:
    """Run until the server or the parent ends. Gives the server's exit status."""
    parent, *command = arguments
    guard = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Held back until asked for: no moment is left in which one could hit a half-started server.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    die_with_parent(signal.SIGTERM, int(parent))
    server = subprocess.Popen(
        [sys.executable, "-m", *command],
        process_group=0,
        preexec_fn=lambda: _prepare_server(guard),
    )
    while server.poll() is None:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            break
    _end_group(server)
    return server.returncode


def _prepare_server(guard: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    die_with_parent(signal.SIGTERM, guard)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    # The server first, alone and once: it ends its own children in order, and many take a second
    # SIGTERM as an order to stop at once.
    if server.poll() is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(GRACE_SECONDS)
    deadline = time.monotonic() + REST_SECONDS
    with contextlib.suppress(ProcessLookupError):  # raised when nobody is left
        os.killpg(server.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            server.poll()
            os.killpg(server.pid, 0)
            time.sleep(0.05)
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
