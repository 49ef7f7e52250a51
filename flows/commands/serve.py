"""`convoy serve`: the deployment alone, with its schedule and its form in the Prefect UI."""

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

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
    from prefect import get_client
    from prefect.runner import Runner
    from prefect.types.entrypoint import EntrypointType

    from flows.automations import install_automations
    from flows.reconciler import start_reconciling
    from flows.train import train

    when = f"by {config.schedule.cron} {config.schedule.timezone}" if schedule else "on demand"
    print(f"serving train/{config.dataset} from {root}, {when}", file=sys.stderr)
    # One flow at a time may use a workspace; the others wait.
    runner = Runner(name=config.dataset, pause_on_shutdown=False, limit=1)
    deployment_id = runner.add_flow(
        train,
        name=config.dataset,
        schedules=[schedule] if schedule else [],
        parameters={"workspace": str(root)},
        description=f"{config.dataset}: raw input to a registered model, in {root}",
        tags=["convoy", config.dataset],
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment_id, UUID)  # a coroutine in an event loop alone
    with get_client(sync_client=True) as client:
        install_automations(client, deployment_id, config.dataset, config.schedule.silence_seconds)
    start_reconciling(train.name, deployment_id)
    with contextlib.suppress(KeyboardInterrupt):  # the ordinary end of it
        asyncio.run(runner.start())
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
