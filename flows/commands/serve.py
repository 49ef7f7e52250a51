"""`convoy serve`: the deployment alone, with its schedule and its form in the Prefect UI."""

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import Config, ScheduleConfig
from pipeline.errors import ConfigError, PipelineError
from pipeline.versioning import check_repository

if TYPE_CHECKING:
    from prefect.schedules import Schedule


def main(options: argparse.Namespace) -> int:
    if not os.environ.get("PREFECT_API_URL"):
        raise PipelineError(
            "PREFECT_API_URL is not set and no `convoy up` runs in this workspace: a served "
            "deployment needs a Prefect server. Run `convoy up`, which starts one, or set "
            "PREFECT_API_URL to yours"
        )
    root = Path.cwd()
    config = Config.load()
    check_repository(root, require_clean=False)
    schedule = read_schedule(config.schedule)
    from prefect.types.entrypoint import EntrypointType

    from flows.train import train

    when = f"by {config.schedule.cron} {config.schedule.timezone}" if schedule else "on demand"
    print(f"serving train/{config.dataset} from {root}, {when}", file=sys.stderr)
    train.serve(
        name=config.dataset,
        schedules=[schedule] if schedule else [],
        parameters={"workspace": str(root)},
        description=f"{config.dataset}: raw input to a registered model, in {root}",
        tags=["convoy", config.dataset],
        pause_on_shutdown=False,
        print_starting_message=False,
        # One flow at a time may use a workspace; the others wait.
        limit=1,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    return 0


def read_schedule(config: ScheduleConfig) -> "Schedule | None":
    """The schedule of the deployment. Raises ConfigError for a cron line or zone that is none."""
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.schedules import Cron
    from pydantic import ValidationError

    if config.cron is None:
        return None
    try:
        CronSchedule(cron=config.cron, timezone=config.timezone)
    except ValidationError as error:
        problem = error.errors()[0]
        message = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"params.yaml: schedule.{problem['loc'][0]}: {message}") from None
    return Cron(config.cron, timezone=config.timezone)
