"""`convoy up`: a Prefect server, an MLflow server and the served deployment, until Ctrl-C."""

import argparse
import contextlib
import sys
import time
from pathlib import Path

from flows.commands.serve import read_schedule
from flows.console import say
from flows.environment import announce_services
from flows.services import Service, await_healthy, free_port, keep_alive, running
from pipeline.config import Config
from pipeline.versioning import check_repository

_POLL_SECONDS = 0.5


def main(options: argparse.Namespace) -> int:
    root = Path.cwd()
    config = Config.load()
    check_repository(root, require_clean=False)
    try:
        _serve_all(root, config, options.prefect_port, options.mlflow_port)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def _serve_all(root: Path, config: Config, preferred_prefect: int, preferred_mlflow: int) -> None:
    """Until an interrupt comes. What is killed is started again. Raises PipelineError when one of
    them ends again and again."""
    state = root / ".convoy"
    with announce_services(root) as announce, contextlib.ExitStack() as stack:
        prefect_port, mlflow_port = free_port(preferred_prefect), free_port(preferred_mlflow)
        for wanted, got in ((preferred_prefect, prefect_port), (preferred_mlflow, mlflow_port)):
            if wanted not in (0, got):
                print(f"port {wanted} is taken: {got} instead of it", file=sys.stderr)
        urls = {
            "prefect": f"http://127.0.0.1:{prefect_port}",
            "mlflow": f"http://127.0.0.1:{mlflow_port}",
        }
        environment = {
            "PREFECT_HOME": str(state / "prefect"),
            "PREFECT_API_URL": f"{urls['prefect']}/api",
            "PREFECT_UI_API_URL": f"{urls['prefect']}/api",
            "MLFLOW_TRACKING_URI": urls["mlflow"],
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }

        def start(name: str, command: list[str]) -> Service:
            log = state / "logs" / f"{name}.log"
            return stack.enter_context(running(name, command, log, environment))

        print("starting Prefect and MLflow ...", file=sys.stderr, flush=True)
        (state / "prefect").mkdir(parents=True, exist_ok=True)
        prefect = start("prefect", _prefect_command(prefect_port))
        mlflow = start("mlflow", _mlflow_command(mlflow_port, state))
        read_schedule(config.schedule)  # its library loads while the servers start
        await_healthy(prefect, f"{urls['prefect']}/api/health")
        await_healthy(mlflow, f"{urls['mlflow']}/health")
        # The last to start and the first to end: its runs tell both servers how they ended.
        served = start("serve", ["flows.cli", "serve"])
        await_healthy(served, f"{urls['prefect']}/api/deployments/name/train/{config.dataset}")
        announce(urls)
        print(
            f"Prefect  {urls['prefect']}\nMLflow   {urls['mlflow']}\n"
            f"logs     {(state / 'logs').relative_to(root)}: what the runs say is in serve.log\n"
            'a run    in the Prefect UI, or in another shell here: eval "$(convoy env)"; prefect '
            f"deployment run train/{config.dataset}\n"
            "Ctrl-C stops all of it.",
            flush=True,
        )
        try:
            while True:
                for service in (prefect, mlflow, served):
                    if told := keep_alive(service):
                        print(told, file=sys.stderr, flush=True)
                time.sleep(_POLL_SECONDS)
        finally:
            # A run that is going on first tells both servers how it ended.
            say("stopping the deployment, MLflow and Prefect")


def _prefect_command(port: int) -> list[str]:
    return ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def _mlflow_command(port: int, state: Path) -> list[str]:
    # Artifacts lie where a run without the server puts them, so either finds what the other left.
    return [
        "mlflow",
        "server",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--backend-store-uri=sqlite:///{state / 'mlflow.db'}",
        f"--default-artifact-root={(state / 'mlartifacts').as_uri()}",
        "--no-serve-artifacts",
        "--workers=1",
    ]
