"""The embedded Prefect and MLflow: homes inside the workspace, telemetry off, quiet.

Set before Prefect is imported, which reads its settings then. What the user set stays.
"""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

UP_FILE = Path(".convoy") / "up.json"
"""Where `convoy up` says that it runs, for other commands in the workspace."""

_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_CLI_PROMPT": "false",
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
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "PREFECT_API_URL" in os.environ or "PREFECT_HOME" in os.environ:
        return
    os.environ["PREFECT_HOME"] = str(root / ".convoy" / "prefect")
    services = find_services(root)
    if services:
        os.environ["PREFECT_API_URL"] = f"{services['prefect']}/api"
        os.environ.setdefault("MLFLOW_TRACKING_URI", services["mlflow"])


def find_services(root: Path) -> dict[str, str] | None:
    """The URLs of the workspace's running `convoy up`, if it answers."""
    try:
        services: dict[str, str] = json.loads((root / UP_FILE).read_text())
    except FileNotFoundError:
        return None
    return services if is_healthy(f"{services['prefect']}/api/health") else None


def is_healthy(url: str) -> bool:
    """Whether a GET of the URL answers 200 within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
