"""The stages wearing Prefect: one line each. DVC says what is up to date, so nothing is cached."""

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from pydantic import BaseModel

from pipeline import stages
from pipeline.checks import check_before_run
from pipeline.config import Config
from pipeline.stages import Stage
from storage.errors import KeyringError, StoreRefused, StoreUnavailable
from training.errors import RegistryError

RETRY_DELAYS_SECONDS = [5.0, 30.0, 120.0]

_MAY_PASS = (StoreUnavailable, KeyringError, RegistryError)


def may_succeed_later(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Retry what another system did not answer; never what would fail in the same way again."""
    result = state.result(raise_on_failure=False)
    return isinstance(result, _MAY_PASS) and not isinstance(result, StoreRefused)


_SETTINGS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 1,
    "retry_delay_seconds": RETRY_DELAYS_SECONDS,
    "retry_condition_fn": may_succeed_later,
}


def _as_task(stage: Stage) -> Task[[Config], BaseModel]:
    return Task(stage, **_SETTINGS)


check = Task(check_before_run, name="check", **_SETTINGS)
ingest = _as_task(stages.ingest)
shard = _as_task(stages.shard)
upload = _as_task(stages.upload)
train = _as_task(stages.train)
evaluate = _as_task(stages.evaluate)
register = _as_task(stages.register)

TASKS: dict[str, Task[[Config], BaseModel]] = {
    "ingest": ingest,
    "shard": shard,
    "upload": upload,
    "train": train,
    "evaluate": evaluate,
    "register": register,
}
