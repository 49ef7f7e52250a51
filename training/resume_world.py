"""Worlds of worker processes, forked from one that has loaded torch, and killed as told."""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.checkpoint_commit import CHECKPOINTS, MARKER, find_on_disk
from training.errors import TrainingError
from training.process import die_with_parent
from training.resume_plan import Kill, count_parts
from training.spec import TrainSpec
from training.trainer import train
from training.workload import Fields, Workload, load_workload

_POLL_SECONDS = 0.0002
_COMMIT_SECONDS = 30.0
_NEVER = math.inf
FAILURE_FILE = "failure.txt"
"""What the first rank that failed by itself said."""


def run_world(spec: TrainSpec, attempt: int, kill: Kill | None, without_dropout: bool) -> bool:
    """Train from the last commit on, in one process a rank; whether it came to the end.

    Raises TrainingError when a rank fails by itself.
    """
    resumed = last_step(spec)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(
                target=_rank,
                args=(spec, rank, attempt, f"{directory}/rendezvous", without_dropout),
                kwargs={"loss_calls": _count_calls(spec, kill, rank, resumed)},
                daemon=True,
            )
            for rank in range(spec.num_workers)
        ]
        for rank in ranks:
            rank.start()
        try:
            was_killed = _watch(ranks, spec, kill)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    if all(rank.exitcode == 0 for rank in ranks):
        return True
    failed = spec.run_directory / FAILURE_FILE
    if not was_killed:
        what = failed.read_text() if failed.exists() else "it left no word"
        raise TrainingError(f"a worker failed: {what}")
    failed.unlink(missing_ok=True)  # of one that lost its peer
    return False


def last_step(spec: TrainSpec) -> int:
    """Of the newest commit; 0 without one."""
    found = find_on_disk(spec.run_directory / CHECKPOINTS)
    return found[-1].commit.step if found else 0


def seen_file(attempt: int, rank: int) -> str:
    """The name of a rank's list of samples, a line of digests for each batch."""
    return f"seen-{attempt}-{rank}.jsonl"


def _count_calls(spec: TrainSpec, kill: Kill | None, rank: int, resumed: int) -> float:
    """The call of loss() in which this rank kills itself."""
    if kill is None or kill.when == "save" or kill.rank not in (None, rank):
        return _NEVER
    return (kill.step - resumed - 1) * count_parts(spec.config) + (
        2 if kill.when == "accumulation" else 1
    )


def _watch(ranks: Sequence[ForkProcess], spec: TrainSpec, kill: Kill | None) -> bool:
    """Wait until all ranks have ended or one has died, or the moment to kill them all has come;
    whether it was a kill that ended them."""
    checkpoints = spec.run_directory / CHECKPOINTS
    in_save = kill is not None and kill.when == "save"
    left_before = set(unfinished(checkpoints))
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        for sentinel in wait(list(running), _POLL_SECONDS if in_save else None):
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            rank.join()
            if rank.exitcode != 0:
                # One that loses its peer may be seen before the peer that was killed.
                return any(other.exitcode == -signal.SIGKILL for other in ranks)
        if in_save and set(unfinished(checkpoints, kill.step if kill else 0)) - left_before:
            return True
    return False


def unfinished(checkpoints: Path, step: int = 0) -> list[str]:
    """Checkpoints from a step on that were begun and not committed."""
    return [
        path.name
        for path in checkpoints.glob("step-*")
        if int(path.name.split("-")[1]) >= step and not (path / MARKER).exists()
    ]


def _rank(
    spec: TrainSpec,
    rank: int,
    attempt: int,
    rendezvous: str,
    without_dropout: bool,
    loss_calls: float,
) -> None:
    die_with_parent(signal.SIGKILL, os.getppid())
    size = spec.num_workers
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    log = os.open(spec.run_directory / "workers.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size
        )
        detail = spec.run_directory / f"failure-{rank}.txt"
        module = load_workload(spec.workload, spec.root, detail).module
        seen = spec.run_directory / seen_file(attempt, rank)
        train(spec, WatchedWorkload(module, detail, seen, loss_calls, without_dropout))
        spec.open_log().close()
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        # The first to fail is the one that matters: its peers only lose it.
        with (
            contextlib.suppress(FileExistsError),
            (spec.run_directory / FAILURE_FILE).open("x") as file,
        ):
            file.write(f"rank {rank}: {error}")
        os._exit(1)


class WatchedWorkload(Workload):
    """A workload that notes which samples training takes, and can end its process in a loss."""

    def __init__(
        self, module: Any, detail: Path, seen: Path, loss_calls: float, without_dropout: bool
    ) -> None:
        super().__init__(module, detail)
        self._seen = seen
        self._calls_left = loss_calls
        self._without_dropout = without_dropout
        self._has_begun = False

    def model(self, params: Mapping[str, Any]) -> nn.Module:
        model = super().model(params)
        if self._without_dropout:
            for module in model.modules():
                if isinstance(module, nn.modules.dropout._DropoutNd):
                    module.p = 0.0
        return model

    def collate(self, records: Sequence[Fields]) -> tuple[Tensor, Tensor]:
        # What the training's own thread asks for is a rehearsal, before the first step.
        if threading.current_thread() is not threading.main_thread():
            self._has_begun = True
            digests = [digest_record(record) for record in records]
            with self._seen.open("a") as file:
                file.write(json.dumps(digests) + "\n")
        return super().collate(records)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self._has_begun and torch.is_grad_enabled():
            self._calls_left -= 1
            if self._calls_left == 0:
                self._die()
        return super().loss(output, target)

    def _die(self) -> None:
        # Steps may be so short that all of them fit into one save: there must be one to go on from.
        checkpoints = self._seen.parent / CHECKPOINTS
        deadline = time.monotonic() + _COMMIT_SECONDS
        while time.monotonic() < deadline and (
            unfinished(checkpoints) or not find_on_disk(checkpoints)
        ):
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def digest_record(record: Any) -> str:
    """A digest of a record's content, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                digest.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for inner in value:
                add(inner)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        else:
            digest.update(f"{type(value).__name__}{value!r}".encode())

    add(record)
    return digest.hexdigest()
