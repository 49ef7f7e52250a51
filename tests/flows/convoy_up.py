"""A running `convoy up`, and what it leaves."""

import contextlib
import re
import signal
import sqlite3
import subprocess
from dataclasses import dataclass
from typing import Any

import psutil
import requests

from tests.flows.pacing import Pace, find_pace
from tests.flows.prefect_api import PrefectApi, wait_until
from tests.workspaces import Workspace

_STATUSES = "SELECT status FROM runs ORDER BY start_time DESC"


@dataclass(frozen=True)
class Up:
    """A workspace whose `convoy up` runs."""

    workspace: Workspace
    process: subprocess.Popen[str]
    api: PrefectApi
    prefect: str
    mlflow: str

    @property
    def pace(self) -> Pace:
        """That of its trainings, where its workload was made to heed one."""
        return find_pace(self.workspace)

    def ask_mlflow(self, path: str, **content: Any) -> Any:
        with requests.Session() as session:
            session.trust_env = False
            url = f"{self.mlflow}/api/2.0/mlflow/{path}"
            if path in ("runs/search", "experiments/search"):
                answer = session.post(url, json=content, timeout=30)
            else:
                answer = session.get(url, params=content, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def is_mlflow_up(self) -> bool:
        try:
            return bool(self.mlflow_runs())
        except requests.RequestException:
            return False

    def mlflow_runs(self) -> list[dict[str, Any]]:
        """All training runs, newest first."""
        found = self.ask_mlflow("runs/search", experiment_ids=["1"], order_by=["start_time DESC"])
        runs: list[dict[str, Any]] = found.get("runs", [])
        return runs

    def mlflow_statuses(self) -> dict[str, str]:
        """How the training of each flow run ended."""
        return {
            tags(run["data"])["prefect.flow_run_id"]: run["info"]["status"]
            for run in self.mlflow_runs()
        }


def tags(content: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in content["tags"]}


def start_up(workspace: Workspace) -> subprocess.Popen[str]:
    # A pytest in the background ignores SIGINT, and what it starts would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return workspace.start("convoy", "up", "--prefect-port", "0", "--mlflow-port", "0")


def read_urls(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What `convoy up` prints once it is ready."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if "Ctrl-C" in line:
            break
    urls = re.search(r"Prefect +(http://\S+)\nMLflow +(http://\S+)\n", text)
    assert urls, text
    return urls[1], urls[2]


def find_processes(workspace: Workspace) -> list[str]:
    """Every process that works in the workspace or has Prefect's home there."""
    found = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("PREFECT_HOME", "")
            if process.cwd() == str(workspace.path) or home.startswith(str(workspace.path)):
                found.append(" ".join([process.name(), *process.cmdline()]))
        except psutil.Error:  # gone meanwhile, or not ours to look at
            continue
    return found


def read_statuses(workspace: Workspace) -> list[str]:
    """How the training runs ended, newest first, as MLflow's database has it, without a server."""
    path = workspace.path / ".convoy" / "mlflow.db"
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return [row[0] for row in database.execute(_STATUSES)]


def await_nobody(workspace: Workspace, seconds: float = 40.0) -> None:
    """Wait until no process of the workspace is left."""
    try:
        wait_until(lambda: not find_processes(workspace), seconds)
    except AssertionError:
        raise AssertionError(f"still there: {find_processes(workspace)}") from None
