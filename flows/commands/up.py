"""`convoy up`: a Prefect server, an MLflow server and the served deployment, until Ctrl-C."""

import argparse
import contextlib
import json
import time
from pathlib import Path

from flows.environment import UP_FILE, find_services
from flows.services import Service, await_healthy, free_port, running
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.versioning import check_repository

_POLL_SECONDS = 0.5


def main(options: argparse.Namespace) -> int:
    root = Path.cwd()
    Config.load()
    check_repository(root, require_clean=False)
    if find_services(root):
        raise PipelineError(f"`convoy up` runs already in {root}: `convoy status` shows its URLs")
    state = root / ".convoy"
    state.mkdir(exist_ok=True)
    prefect_port, mlflow_port = free_port(options.prefect_port), free_port(options.mlflow_port)
    prefect, mlflow = f"http://127.0.0.1:{prefect_port}", f"http://127.0.0.1:{mlflow_port}"
    environment = {
        "PREFECT_HOME": str(state / "prefect"),
        "PREFECT_API_URL": f"{prefect}/api",
        "PREFECT_UI_API_URL": f"{prefect}/api",
        "MLFLOW_TRACKING_URI": mlflow,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    print("starting Prefect and MLflow ...", flush=True)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(running(name, command, state / "logs" / f"{name}.log", environment))
            for name, command in (
                ("prefect", _prefect_command(prefect_port)),
                ("mlflow", _mlflow_command(mlflow_port, state)),
            )
        ]
        await_healthy(servers[0], f"{prefect}/api/health")
        await_healthy(servers[1], f"{mlflow}/health")
        served = ["flows.cli", "serve"]
        log = state / "logs" / "serve.log"
        servers.append(stack.enter_context(running("serve", served, log, environment)))
        up_file = root / UP_FILE
        up_file.write_text(json.dumps({"prefect": prefect, "mlflow": mlflow}))
        stack.callback(up_file.unlink, missing_ok=True)
        print(f"Prefect  {prefect}\nMLflow   {mlflow}\nCtrl-C stops all of it.", flush=True)
        _watch(servers)
    return 0


def _prefect_command(port: int) -> list[str]:
    return ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def _mlflow_command(port: int, state: Path) -> list[str]:
    return [
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--backend-store-uri=sqlite:///{state / 'mlflow.db'}",
        f"--artifacts-destination={state / 'mlartifacts'}",
        "--workers=1",
    ]


def _watch(servers: list[Service]) -> None:
    """Until one ends or an interrupt comes."""
    while True:
        for server in servers:
            if server.process.poll() is not None:
                raise PipelineError(f"the {server.name} process ended: see {server.log}")
        time.sleep(_POLL_SECONDS)
