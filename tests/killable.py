"""A real server that a test can kill whole and start again, as its machine would."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from flows.services import await_healthy, free_port, running


class KillableServer:
    """A Python module as a server on a port of its own, the same one after each start."""

    def __init__(
        self, command: Sequence[str], health: str, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.port = free_port(0)
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [*command, "--host=127.0.0.1", f"--port={self.port}"]
        self._health = health
        self._log = log
        self._environment = environment
        self._stack = ExitStack()

    def start(self) -> None:
        service = self._stack.enter_context(
            running("server", self._command, self._log, self._environment)
        )
        await_healthy(service, f"{self.url}/{self._health}")
        self._guard = psutil.Process(service.process.pid)

    def kill(self) -> None:
        # The guard first, so that it does not end the server in order.
        family = self._guard.children(recursive=True)
        for process in (self._guard, *family):
            process.kill()
        psutil.wait_procs(family, 10)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and answers none."""
        family = self._guard.children(recursive=True)
        for process in family:
            process.suspend()
        try:
            yield
        finally:
            for process in family:
                process.resume()

    def close(self) -> None:
        self._stack.close()
