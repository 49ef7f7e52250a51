"""The embedded Prefect and MLflow: homes inside the workspace, telemetry off, quiet.

Set before Prefect is imported, which reads its settings then. What the user set stays.
"""

import contextlib
import fcntl
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from pipeline.errors import PipelineError

UP_FILE = Path(".convoy") / "up.json"
"""Where `convoy up` says that it runs, for other commands in the workspace."""

_READ_SECONDS = 0.5
"""Longer than anybody holds the file who only reads it."""

# Never by a proxy that the environment names: these are servers of this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_RUNNER_POLL_FREQUENCY": "2",  # seconds until a click in the UI starts a run
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # Doubling waits, four minutes in all: for so long a call waits for a server that is away.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    # Looking for them reads the metadata of every installed package, in every process.
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def prepare_environment(root: Path) -> None:
    """Point Prefect and MLflow at this workspace's running `convoy up`, or at embedded ones."""
    # It would compile every import anew in every process.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if os.environ.get("PREFECT_API_URL"):
        return
    os.environ.setdefault("PREFECT_HOME", str(root / ".convoy" / "prefect"))
    services = find_services(root)
    if services:
        os.environ["PREFECT_API_URL"] = f"{services['prefect']}/api"
        os.environ.setdefault("MLFLOW_TRACKING_URI", services["mlflow"])


@contextlib.contextmanager
def announce_services(root: Path) -> Iterator[Callable[[dict[str, str]], None]]:
    """Be the workspace's `convoy up` for a block; gives what tells the others the URLs.

    Raises PipelineError when another one runs. The kernel drops the lock on the file with its
    owner: URLs that a killed `convoy up` left are not taken for true.
    """
    path = root / UP_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("a+") as file:
        deadline = time.monotonic() + _READ_SECONDS
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"`convoy up` runs already in {root}: `convoy status` shows its URLs"
                )
            time.sleep(0.05)
        file.truncate(0)

        def tell(services: dict[str, str]) -> None:
            file.write(json.dumps(services))
            file.flush()

        try:
            yield tell
        finally:
            file.truncate(0)


def find_services(root: Path) -> dict[str, str] | None:
    """The URLs of the workspace's running `convoy up`, once it has them."""
    try:
        with (root / UP_FILE).open() as file:
            if _lock(file, fcntl.LOCK_SH):
                return None
            text = file.read()
    except FileNotFoundError:
        return None
    services: dict[str, str] | None = json.loads(text) if text else None
    return services


def is_healthy(url: str) -> bool:
    """Whether a GET of the URL answers 200 within two seconds."""
    try:
        with _DIRECT.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
