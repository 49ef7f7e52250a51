"""`convoy reconcile`: what MLflow and Prefect missed, by hand."""

import argparse
import json
import os
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.versioning import check_repository
from pipeline.workspace import OUTBOX
from training.outbox import deliver_left


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    root = Path.cwd()
    check_repository(root, require_clean=False)
    num_runs = deliver_left(root / OUTBOX, config.tracking_uri)
    lines = [f"MLflow was told what it had missed of {num_runs} runs"] if num_runs else []
    if os.environ.get("PREFECT_API_URL"):
        lines += _reconcile_prefect(config)
    else:
        lines.append(
            "no Prefect server is known here: `convoy up` starts one, and does this itself"
        )
    if options.json:
        print(json.dumps(lines, indent=2))
    else:
        print("\n".join(lines) or "MLflow and Prefect know all")
    return 0


def _reconcile_prefect(config: Config) -> list[str]:
    from prefect import get_client
    from prefect.exceptions import ObjectNotFound

    from flows.reconciler import reconcile
    from flows.train import train

    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(f"{train.name}/{config.dataset}")
        except ObjectNotFound:
            raise PipelineError(
                f"Prefect at {os.environ['PREFECT_API_URL']} has no deployment "
                f"{train.name}/{config.dataset}: `convoy serve` makes it"
            ) from None
    return reconcile(train.name, deployment.id)
