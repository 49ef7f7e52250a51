"""Servers that belong to one command: started, awaited, and ended with it, none left behind."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flows.environment import is_healthy
from flows.guard import GRACE_SECONDS, REST_SECONDS
from pipeline.errors import PipelineError

_START_SECONDS = 180.0
_POLL_SECONDS = 0.1
_LOG_LINES = 8
_MAX_DEATHS, _DEATHS_SECONDS = 5, 600.0
"""A server that ends more often in this time is not started again."""


@dataclass
class Service:
    """A running server, under its guard."""

    name: str
    start: Callable[[str], subprocess.Popen[bytes]]
    """Starts it, its log opened in this mode."""
    process: subprocess.Popen[bytes]
    log: Path
    deaths: list[float] = field(default_factory=list)


def free_port(preferred: int) -> int:
    """The preferred port of 127.0.0.1, or one that is free when it is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise PipelineError(f"no port of 127.0.0.1 is free, not even instead of {preferred}")


@contextlib.contextmanager
def running(
    name: str, arguments: list[str], log: Path, environment: Mapping[str, str]
) -> Iterator[Service]:
    """A Python module as a server in a process group of its own, ended whole with the block.

    It ends as well when this process is killed. Its log is that of this start alone.
    """
    log.parent.mkdir(parents=True, exist_ok=True)

    def start(mode: str) -> subprocess.Popen[bytes]:
        with log.open(mode) as output:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.guard", str(os.getpid()), *arguments],
                # A `data` folder or `tasks.py` of the workspace must not hide the packages.
                env={**os.environ, **environment, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Ctrl-C on the terminal is for this process, which ends its servers in order.
                process_group=0,
            )

    service = Service(name, start, start("wb"), log)
    try:
        yield service
    finally:
        service.process.terminate()
        service.process.wait(GRACE_SECONDS + REST_SECONDS + 5)


def keep_alive(service: Service) -> str:
    """Start a server again that ended by itself or was killed; gives words for that, else none.

    Raises PipelineError when it ended too often of late.
    """
    if service.process.poll() is None:
        return ""
    now = time.monotonic()
    service.deaths = [*(t for t in service.deaths if now - t < _DEATHS_SECONDS), now]
    if len(service.deaths) > _MAX_DEATHS:
        check_alive(service)
    status = service.process.returncode
    service.process = service.start("ab")
    return f"{service.name} ended with status {status} and is started again"


def await_healthy(service: Service, url: str) -> None:
    """Wait until the URL answers. Raises PipelineError with the end of the log if it does not."""
    deadline = time.monotonic() + _START_SECONDS
    while not is_healthy(url):
        check_alive(service)
        if time.monotonic() > deadline:
            raise PipelineError(
                f"{service.name} does not answer at {url} after {_START_SECONDS:.0f} s"
                + _tell_log(service)
            )
        time.sleep(_POLL_SECONDS)


def check_alive(service: Service) -> None:
    """Raise PipelineError with the end of the log if the server ended by itself."""
    if service.process.poll() is not None:
        raise PipelineError(
            f"{service.name} ended with status {service.process.returncode}" + _tell_log(service)
        )


def _tell_log(service: Service) -> str:
    lines = service.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return f"; the end of {service.log}:\n" + "\n".join(lines)
