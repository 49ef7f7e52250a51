"""The nodes of this machine, for all workspaces of a user: none is given to two runs.

How many there are is said in the environment, for it is the machine's and no run's. Not said, each
run makes as many as it asks for, of its own.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from pipeline.errors import ConfigError, PipelineError
from pipeline.progress import report_event

NODES_VARIABLE = "CONVOY_MACHINE_NODES"
_POLL_SECONDS = 0.25


def check_capacity(number: int) -> None:
    """Raise ConfigError when this machine never has so many nodes."""
    capacity = _read_capacity()
    if capacity is not None and number > capacity:
        raise ConfigError(
            f"params.yaml: train.nodes: {number} are asked for and this machine has {capacity}, by "
            f"{NODES_VARIABLE}: lower train.nodes, or say there that it has more"
        )


@contextlib.contextmanager
def hold_nodes(number: int, seconds: float, stage: str) -> Iterator[None]:
    """Have so many of this machine's nodes for a block: all of them, or none.

    Who waits first is served first, so that many small runs keep no large one waiting for ever. The
    kernel gives the nodes of a process back when it ends, however that ends. Raises PipelineError,
    naming who has the nodes, when they do not come free in time.
    """
    capacity = _read_capacity()
    if capacity is None:
        yield
        return
    check_capacity(number)
    directory = _open_directory()
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        with _wait_in_line(directory, deadline, number, capacity, stage):
            nodes = _take(directory, number, capacity)
            if nodes is None:
                report_event(
                    stage,
                    f"waiting for {number} of this machine's {capacity} nodes; none is started "
                    f"before all of them are free. {_describe_holders(directory, capacity)}",
                )
            while nodes is None:
                if time.monotonic() > deadline:
                    raise _too_late(directory, number, capacity)
                time.sleep(_POLL_SECONDS)
                nodes = _take(directory, number, capacity)
        for node in nodes:
            stack.enter_context(node)
            node.truncate(0)
            since = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
            node.write(f"{Path.cwd()}, {stage}, process {os.getpid()}, since {since}")
            node.flush()
        yield


def _read_capacity() -> int | None:
    text = os.environ.get(NODES_VARIABLE, "")
    if not text:
        return None
    if not text.isdigit() or not int(text):
        raise ConfigError(f"{NODES_VARIABLE}: '{text}' is no number of nodes: 1, 2, ...")
    return int(text)


def _open_directory() -> Path:
    """This user's, and gone with the machine's boot."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    place = Path(runtime or tempfile.gettempdir())
    directory = place / ("convoy" if runtime else f"convoy-{os.getuid()}")
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PipelineError(
            f"{directory} is another user's: set XDG_RUNTIME_DIR to a folder of yours"
        )
    return directory


@contextlib.contextmanager
def _wait_in_line(
    directory: Path, deadline: float, number: int, capacity: int, stage: str
) -> Iterator[None]:
    with (directory / "line").open("a") as line:
        if not _lock(line):
            report_event(stage, "waiting in line: another run waits for nodes of this machine")
        while not _lock(line):
            if time.monotonic() > deadline:
                raise _too_late(directory, number, capacity)
            time.sleep(_POLL_SECONDS)
        yield


def _take(directory: Path, number: int, capacity: int) -> list[IO[str]] | None:
    """Files of so many free nodes, locked; None, and none of them, when there are fewer."""
    taken: list[IO[str]] = []
    for node in range(capacity):
        file: IO[str] = _node_file(directory, node).open("a+")
        if len(taken) < number and _lock(file):
            taken.append(file)
        else:
            file.close()
    if len(taken) == number:
        return taken
    for file in taken:
        file.close()
    return None


def _describe_holders(directory: Path, capacity: int) -> str:
    held = []
    for node in range(capacity):
        with _node_file(directory, node).open("a+") as content:
            if not _lock(content):
                content.seek(0)
                held.append(f"node {node} is in use by {content.read()}")
    return "; ".join(held) or "They have just come free"


def _too_late(directory: Path, number: int, capacity: int) -> PipelineError:
    return PipelineError(
        f"{number} of this machine's {capacity} nodes did not come free in time, and the run "
        f"starts none. {_describe_holders(directory, capacity)}. Wait for them and call it again, "
        "or raise params.yaml: schedule.wait_seconds or, if the machine has more nodes, "
        f"{NODES_VARIABLE}"
    )


def _node_file(directory: Path, node: int) -> Path:
    return directory / f"node-{node}"


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
