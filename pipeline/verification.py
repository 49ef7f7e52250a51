"""`convoy verify resume`: the present workload, killed and resumed, against an undisturbed run."""

import math
import os
import random
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data.shard import Shard
from pipeline import workspace
from pipeline.borders import log_refusals
from pipeline.checks import check_site, open_workload, read_current_manifest
from pipeline.config import Config
from pipeline.errors import ConfigError, PipelineError
from pipeline.specs import common_fields
from training.config import CheckpointConfig, TrainConfig
from training.process import PARENT_VARIABLE
from training.resume_plan import Kill, ResumeCase, ResumeFindings, ResumePlan, count_parts
from training.spec import TrainSpec
from training.synchronize_config import SynchronizeConfig

SCRATCH = workspace.STATE / "verify"
MIN_STEPS = 16
_EPOCH_SHARE = 0.6
"""Of the steps in one epoch at most, so that an epoch's end comes in the middle."""
_TOLERANCE = 1e-3
"""Relative difference of a loss when the same sum is rounded in another order, step upon step."""
_LOW_TOLERANCE = 3e-2
"""The same in bfloat16, which has 8 bits."""


def verify_resume(
    config: Config,
    root: Path,
    *,
    steps: int,
    seed: int,
    on_progress: Callable[[str], None] = lambda what: None,
) -> ResumeFindings:
    """Train a short while undisturbed, then killed at random moments and resumed, and compare.

    Works in a directory of its own, which goes when everything could be tried; reads the region's
    shards as training does, and touches neither artifacts nor MLflow nor the store's checkpoints.
    Raises ConfigError for too few steps, PipelineError when a run cannot be tried.
    """
    if config.train.synchronize.mode == "asynchronous":
        raise ConfigError(
            "params.yaml: train.synchronize.mode: asynchronous workers take batches as they come, "
            "so that no two runs are equal, and there is nothing to compare: take another mode to "
            "verify the rest of the training"
        )
    if steps < MIN_STEPS:
        raise ConfigError(f"--steps {steps}: take {MIN_STEPS} or more, or there is no room to kill")
    open_workload(config, root)
    manifest = read_current_manifest(config)
    readable, _ = log_refusals(config, lambda: check_site(config, manifest))
    directory = root / SCRATCH / secrets.token_hex(4)
    plan = ResumePlan(
        directory=directory,
        cases=tuple(plan_cases(config, root, readable, steps=steps, seed=seed)),
    )
    with workspace.explain_disk(directory):
        directory.mkdir(mode=0o700, parents=True)
        findings = _check(plan, root, on_progress)
    if findings.error:
        raise PipelineError(f"{findings.error}. What the workers left is in {directory}")
    shutil.rmtree(directory)
    return findings


def plan_cases(
    config: Config, root: Path, readable: Sequence[Shard], *, steps: int, seed: int
) -> list[ResumeCase]:
    """The same layout; the same with mixed precision and accumulation; another layout, unless it is
    the number of copies that says what a step is."""
    draw = random.Random(seed)
    every = max(2, steps // 5)
    plain = _shorten(config.train, steps, every)
    shards = _choose_shards(readable, plain)
    cases = [_case("same workers", config, root, plain, shards, _draw_kills(draw, plain, every))]
    accumulated = _vary(plain, accumulate=2)
    mixed = _vary(accumulated or plain, precision="bfloat16")
    if mixed and plain.precision == "float32":
        kills = _draw_kills(draw, mixed, every)
        cases.append(_case("mixed precision", config, root, mixed, shards, kills))
    how = plain.synchronize
    other = None if how.is_local or how.compress == "powersgd" else _other_layout(plain)
    if other:
        step = draw.randrange(every + 1, steps)
        kills = (Kill(when="step", step=step, rank=_draw_rank(draw, plain)),)
        case = _case("other workers", config, root, plain, shards, kills)
        change: dict[str, Any] = {"then": other.dims}
        if not plain.reproducible:
            low = plain.precision != "float32"
            tolerance = _LOW_TOLERANCE if low else _TOLERANCE
            change |= {"without_dropout": True, "loss_tolerance": tolerance}
        cases.append(case.model_copy(update=change))
    return cases


def _shorten(train: TrainConfig, steps: int, every: int) -> TrainConfig:
    """The same training in so many steps, each logged, with its schedule cut to fit."""
    optimizer = train.optimizer.model_copy(
        update={"warmup_steps": min(train.optimizer.warmup_steps, steps // 4)}
    )
    checkpoint = CheckpointConfig(every_steps=every, store=False)
    short = {
        "steps": steps,
        "optimizer": optimizer,
        "checkpoint": checkpoint,
        "synchronize": _hurry(train.synchronize, every),
        # What it verifies is a restart.
        "recovery": train.recovery.model_copy(update={"mode": "restart"}),
    }
    return train.model_copy(update=short | {"log_every_steps": 1, "cache": None})


def _hurry(how: SynchronizeConfig, every: int) -> SynchronizeConfig:
    """The same way to synchronise, often enough for a short run to see it."""
    # A little less often than there are checkpoints, so that some come between two averages.
    parts = math.ceil(max(every + 1, how.overlap_steps + 1) / how.num_fragments)
    often = {
        "every_steps": min(how.every_steps, parts * how.num_fragments),
        "powersgd_start_step": min(how.powersgd_start_step, max(2, every)),
    }
    return how.model_copy(update=often)


def _choose_shards(readable: Sequence[Shard], train: TrainConfig) -> frozenset[str]:
    """Small ones first, as many as make an epoch that ends within the run."""
    wanted = train.steps * train.global_batch * _EPOCH_SHARE
    chosen: list[Shard] = []
    for shard in sorted(readable, key=lambda shard: (shard.num_records, shard.name)):
        num_records = sum(other.num_records for other in chosen) + shard.num_records
        if chosen and num_records > wanted:
            break
        chosen.append(shard)
    return frozenset(shard.name for shard in chosen)


def _draw_kills(draw: random.Random, train: TrainConfig, every: int) -> tuple[Kill, ...]:
    """In a step before the middle, in a save, and with accumulation inside a step after it."""
    rank = _draw_rank(draw, train)
    middle = train.steps // 2
    kills = [
        Kill(when="step", step=draw.randrange(every + 1, middle), rank=rank),
        Kill(when="save", step=draw.randrange(middle, train.steps - 2 * every)),
    ]
    if count_parts(train) > 1:
        step = draw.randrange(train.steps - every, train.steps)
        kills.append(Kill(when="accumulation", step=step, rank=rank))
    return tuple(kills)


def _draw_rank(draw: random.Random, train: TrainConfig) -> int | None:
    """Who dies; null for pipelines, where only ranks with the last stage compute a loss."""
    return None if train.dims.pp > 1 else draw.randrange(train.dims.world_size)


def _other_layout(train: TrainConfig) -> TrainConfig | None:
    """Half as many replicas or shards, or twice as many replicas when there is one worker."""
    dims = train.dims
    if dims.dp_replicate > 1 and dims.dp_replicate % 2 == 0:
        other = {"dp_replicate": dims.dp_replicate // 2}
    elif dims.dp_shard > 1 and dims.dp_shard % 2 == 0:
        other = {"dp_shard": dims.dp_shard // 2}
    else:
        other = {"dp_replicate": dims.dp_replicate * 2}
    return _vary(train, dims=dims.model_dump() | other)


def _vary(train: TrainConfig, **changes: Any) -> TrainConfig | None:
    """The config with other values; None where they do not go together with the rest."""
    try:
        return TrainConfig.model_validate(train.model_dump() | changes)
    except ValidationError:
        return None


def _case(
    name: str,
    config: Config,
    root: Path,
    train: TrainConfig,
    shards: frozenset[str],
    kills: tuple[Kill, ...],
) -> ResumeCase:
    spec = TrainSpec(
        **common_fields(config, root, "", root / SCRATCH),
        config=train,
        primary=config.evaluate.primary,
        fingerprint="0" * 64,  # of a run that nobody else goes on with
        tracking_uri="",
        only_shards=shards,
    )
    return ResumeCase(name=name, spec=spec, kills=kills)


def _check(plan: ResumePlan, root: Path, on_progress: Callable[[str], None]) -> ResumeFindings:
    """Have another process try the cases: it loads torch, and forks."""
    plan_path, answer_path = plan.directory / "plan.json", plan.directory / "answer.json"
    plan_path.write_text(plan.model_dump_json(indent=1))
    environment = dict(os.environ)
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment["PYTHONSAFEPATH"] = "1"  # a `data` folder of the workspace must not hide ours
    environment["OMP_NUM_THREADS"] = "1"  # forked from more threads than one, torch hangs
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    log = plan.directory / "check.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "training.resume_check", str(plan_path), str(answer_path)],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,
        ) as checking,
    ):
        assert checking.stdout is not None
        try:
            for line in checking.stdout:
                on_progress(line.rstrip())
        finally:
            checking.kill()
    try:
        return ResumeFindings.model_validate_json(answer_path.read_bytes())
    except FileNotFoundError:
        raise PipelineError(f"the check ended without an answer: {log} says why") from None
