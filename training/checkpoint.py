"""Committed, resumable states: a fresh directory each, the marker written last."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training.errors import CheckpointError

MARKER = "committed.json"
_FULL_BYTES = 64 << 10
"""Free space below which a write failed for want of it."""


class Checkpoint(BaseModel, frozen=True, extra="forbid"):
    """What a commit marker says."""

    step: int
    """Steps that were done."""
    cursor: int
    """First global sample position that was not used."""
    fingerprint: str


def save_checkpoint(
    directory: Path,
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> None:
    """Write and commit a state; a kill at any moment leaves the earlier ones whole.

    Called by every rank. Raises CheckpointError naming the directory, for example for a full disk.
    """
    target = directory / f"step-{checkpoint.step:08d}"
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)  # what a killed save left
    dist.barrier()
    try:
        save(_state(model, optimizer), checkpoint_id=target)
        if dist.get_rank() == 0:
            _commit(target, checkpoint)
    except (Exception, CheckpointException) as error:  # of DCP, which is no Exception
        reason = _reason(error, directory)
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)  # no use, and in the way of what is said now
        raise CheckpointError(
            f"checkpoint {target} could not be written ({reason}); the one before it is whole: "
            "make room or mend the disk and run `convoy stage train`, which goes on from it"
        ) from error
    if dist.get_rank() == 0:
        for old in sorted(find_checkpoints(directory))[:-keep]:
            (old / MARKER).unlink()
            shutil.rmtree(old)
    dist.barrier()


def load_checkpoint(
    directory: Path, fingerprint: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Checkpoint | None:
    """Load the newest committed state in place; None when there is none yet.

    Raises CheckpointError for a checkpoint of another run, and for one that was changed.
    """
    found = find_checkpoints(directory)
    if not found:
        return None
    newest = max(found)
    checkpoint = Checkpoint.model_validate_json((newest / MARKER).read_bytes())
    if checkpoint.fingerprint != fingerprint:
        raise CheckpointError(
            f"{newest} is of another run ({checkpoint.fingerprint[:12]}, this one is "
            f"{fingerprint[:12]}): its workload, manifest or parameters differ; delete {directory}"
        )
    state = _state(model, optimizer)
    try:
        load(state, checkpoint_id=newest)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{newest} cannot be read ({_reason(error, directory)}): delete it and run `convoy "
            "stage train`, which goes on from the one before it"
        ) from error
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    torch.set_rng_state(state[_rng_key()])
    return checkpoint


def find_checkpoints(directory: Path) -> list[Path]:
    """The committed ones."""
    return [path.parent for path in directory.glob(f"step-*/{MARKER}")]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    parameters, optimizer_state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": optimizer_state, _rng_key(): torch.get_rng_state()}


def _rng_key() -> str:
    return f"rng-{dist.get_rank()}"


def _commit(target: Path, checkpoint: Checkpoint) -> None:
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    pending = target / f"{MARKER}.tmp"
    with pending.open("w") as file:
        json.dump(checkpoint.model_dump(), file)
        file.flush()
        os.fsync(file.fileno())
    pending.rename(target / MARKER)


def _reason(error: BaseException, directory: Path) -> str:
    """What went wrong, in one line; of a full disk DCP itself says no word."""
    if shutil.disk_usage(directory).free < _FULL_BYTES:
        return os.strerror(errno.ENOSPC)
    if isinstance(error, CheckpointException):
        error = next(failure for failure, _ in error.failures.values())
    return f"{type(error).__name__}: {error}".splitlines()[0]
