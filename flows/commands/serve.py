"""`convoy serve`: the deployment alone, with its schedule and its form in the Prefect UI."""

import argparse
import os
import sys
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.versioning import check_repository

DEPLOYMENT = "convoy"


def main(options: argparse.Namespace) -> int:
    if "PREFECT_API_URL" not in os.environ:
        raise PipelineError(
            "PREFECT_API_URL is not set and no `convoy up` runs in this workspace: a served "
            "deployment needs a Prefect server. Run `convoy up`, which starts one, or set "
            "PREFECT_API_URL to yours"
        )
    root = Path.cwd()
    config = Config.load()
    check_repository(root, require_clean=False)
    from flows.train import train

    schedule = config.schedule
    print(f"serving train/{DEPLOYMENT} from {root}", file=sys.stderr)
    train.serve(
        name=DEPLOYMENT,
        cron=schedule.cron,
        parameters={"workspace": str(root)},
        description=f"{config.dataset}: raw input to a registered model, in {root}",
        tags=["convoy", config.dataset],
        pause_on_shutdown=False,
        limit=1,
    )
    return 0
