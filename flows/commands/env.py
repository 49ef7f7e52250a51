"""`convoy env`: the environment of this workspace's commands, as lines for a shell."""

import argparse
import os
import shlex

from flows.environment import DEFAULTS
from pipeline.config import Config

_WHERE = ("PREFECT_HOME", "PREFECT_API_URL", "MLFLOW_TRACKING_URI")


def main(options: argparse.Namespace) -> int:
    """Print an export for each variable: where Prefect and MLflow are, and no telemetry."""
    # While no `convoy up` says where MLflow is, params.yaml does.
    os.environ.setdefault("MLFLOW_TRACKING_URI", Config.load().tracking_uri)
    for name in (*_WHERE, *DEFAULTS):
        if name in os.environ:
            print(f"export {name}={shlex.quote(os.environ[name])}")
    return 0
