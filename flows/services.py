"""Servers that belong to one command: started, awaited, and ended with it, none left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.environment import is_healthy
from pipeline.errors import PipelineError

_START_SECONDS = 180.0
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Service:
    """A running server."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


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
    """A Python module as a server in a process group of its own, ended whole with the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.guard", *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        yield Service(name, process, log)
    finally:
        _stop(process)


def await_healthy(service: Service, url: str) -> None:
    """Wait until the URL answers. Raises PipelineError with the end of the log if it does not."""
    deadline = time.monotonic() + _START_SECONDS
    while not is_healthy(url):
        if service.process.poll() is not None or time.monotonic() > deadline:
            tail = service.log.read_text(errors="replace").splitlines()[-5:]
            raise PipelineError(
                f"the {service.name} server did not start; the end of {service.log}:\n"
                + "\n".join(tail)
            )
        time.sleep(0.25)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to the whole group: these servers leave children when killed alone."""
    for number, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
