"""The main flow: ingest, shard, upload, train, evaluate, register, and a snapshot to end it."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import State, flow, get_run_logger
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from flows.lives import ForcedStages, begin_life, heed_cancelling
from pipeline.config import Config
from pipeline.dvc_locks import restore_lock_file
from pipeline.lineage import FLOW_RUN_VARIABLE
from pipeline.params import set_params
from pipeline.progress import Progress, current_listener, listening, report
from pipeline.runs import retire_results
from pipeline.versioning import Snapshot, commit_stage, find_stale
from pipeline.workspace import lock_workspace
from tasks.publisher import Publisher
from tasks.snapshot import snapshot
from tasks.stages import TASKS, check
from training.process import die_with_parent

_PROGRESS_SECONDS = 5.0
_PARAMS = {
    "steps": "train.steps",
    "global_batch": "train.global_batch",
    "learning_rate": "train.optimizer.lr",
    "seed": "train.seed",
    "on_restricted": "residency.on_restricted",
}
"""What the flow's parameters are in params.yaml."""


@flow(name="train", persist_result=False)
def train(
    workspace: str = ".",
    steps: PositiveInt | None = None,
    global_batch: PositiveInt | None = None,
    learning_rate: PositiveFloat | None = None,
    seed: NonNegativeInt | None = None,
    on_restricted: Literal["fail", "exclude"] | None = None,
    force: bool = False,
    continues: UUID | None = None,
) -> Snapshot | State[Any]:
    """From raw input to a registered model; stages that DVC finds up to date are not redone.

    A value given here is written into params.yaml, which stays the truth of the run; None leaves
    what stands there.

    Args:
        workspace: Folder of params.yaml and dvc.yaml.
        steps: Optimiser steps. None: train.steps of params.yaml.
        global_batch: Samples in one step, over all workers. None: train.global_batch.
        learning_rate: Peak learning rate. None: train.optimizer.lr.
        seed: Seed of the initial weights and of the sample order. None: train.seed.
        on_restricted: Shards that the training site may not read: fail, or exclude them and report
            it. None: residency.on_restricted.
        force: Run every stage, up to date or not.
        continues: A flow run that crashed, to go on with it as it was asked for. Filled in by the
            automation that submits crashed runs again.
    """
    if _is_deployed():
        # A runner that is killed cannot end its runs.
        die_with_parent(signal.SIGTERM, os.getppid())
    else:
        heed_cancelling()
    root = Path(workspace).resolve()
    run = begin_life(root, continues)
    if isinstance(run, State):
        return run
    asked = {
        "steps": steps,
        "global_batch": global_batch,
        "learning_rate": learning_rate,
        "seed": seed,
        "on_restricted": on_restricted,
        "force": force,
    } | run.asked
    given = {_PARAMS[k]: v for k, v in asked.items() if k in _PARAMS and v is not None}
    with _inside(root), lock_workspace(root, f"flow run {flow_run.get_name()}"):
        restore_lock_file(root)
        config = set_params(Path("params.yaml"), given) if given else Config.load()
        check.with_options(retries=config.schedule.retries)(config, root)
        forced = ForcedStages(root, run.id) if asked["force"] else None
        if forced is not None and not forced.done:
            retire_results(root)
        with Publisher(get_run_logger()) as publisher, listening(_Watcher(publisher)):
            ran = _run_stages(config, root, forced, publisher)
        return snapshot(root, ran)


def _run_stages(
    config: Config, root: Path, forced: ForcedStages | None, publisher: Publisher
) -> tuple[str, ...]:
    rows: list[dict[str, Any]] = []
    ran: list[str] = []
    try:
        for name, stage in TASKS.items():
            is_due = forced is not None and name not in forced.done
            reasons = ["forced"] if is_due else find_stale(root, name)
            if not reasons:
                report(name, 0, 0, "", "up to date")
                rows.append({"stage": name, "ran": "up to date", "seconds": 0.0, "because": ""})
                continue
            because = "; ".join(reasons[:3])
            report(name, 0, None, "", because)
            started = time.monotonic()
            result = stage.with_options(retries=config.schedule.retries)(config)
            commit_stage(root, name)
            if forced is not None:
                forced.add(name)
            publisher.publish(result, config.tracking_uri)
            seconds = round(time.monotonic() - started, 1)
            report(name, 0, 0, "", f"done in {seconds} s")
            rows.append({"stage": name, "ran": "yes", "seconds": seconds, "because": because})
            ran.append(name)
    finally:
        publisher.publish_stages(rows)
    return tuple(ran)


def _is_deployed() -> bool:
    # prefect.runtime.deployment would ask the API.
    context = FlowRunContext.get()
    return bool(context and context.flow_run and context.flow_run.deployment_id)


@contextlib.contextmanager
def _inside(root: Path) -> Iterator[None]:
    """The workspace as current directory, and the flow run's id for the lineage."""
    before = Path.cwd()
    os.chdir(root)
    os.environ[FLOW_RUN_VARIABLE] = str(flow_run.get_id())
    try:
        yield
    finally:
        del os.environ[FLOW_RUN_VARIABLE]
        os.chdir(before)


class _Watcher:
    """Progress to the UI, as bar and as log line, and to whoever listens outside of the flow."""

    def __init__(self, publisher: Publisher) -> None:
        self._outer = current_listener()
        self._publisher = publisher
        self._logger = get_run_logger()
        self._kind = ("", False)
        self._shown = 0.0

    def __call__(self, progress: Progress) -> None:
        if self._outer is not None:
            self._outer(progress)
        if progress.is_event:
            self._logger.warning("%s", progress)
            return
        now = time.monotonic()
        # The first word of a stage has no total yet, and must not keep the first count away.
        kind = (progress.stage, bool(progress.total))
        soon = kind == self._kind and now - self._shown < _PROGRESS_SECONDS
        if soon and progress.done != progress.total:
            return
        self._kind, self._shown = kind, now
        self._publisher.show(progress)
        self._logger.info("%s", progress)
