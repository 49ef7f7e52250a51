"""Committed, resumable states: a fresh directory each, the marker written last."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from training.errors import CheckpointError

MARKER = "committed.json"


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
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {target} could not be written ({_reason(error)}); the one before it is "
            "whole: make room or mend the disk and run `convoy stage train`, which goes on from it"
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

    Raises CheckpointError for a checkpoint of another run.
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
    load(state, checkpoint_id=newest)
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


def _reason(error: BaseException) -> str:
    """The first line of the deepest cause: DCP wraps what the disk said in its own errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]
