"""What a replica of a hot world is told, and how one that was given up is kept from going on.

Each start of a replica is a *life*, with a number that no other of its world has. Loads no torch.
"""

import json
import os
from pathlib import Path

from pydantic import BaseModel

from training.errors import CheckpointError
from training.spec import TrainSpec, read_fencing_token

REPLICA_VARIABLE = "CONVOY_REPLICA"
_GIVEN_UP = "given-up.json"


class ReplicaOrder(BaseModel, frozen=True, extra="forbid"):
    """One start of a replica."""

    number: int
    """Of the replica: what a rank is in other worlds."""
    life: int
    num_replicas: int
    """Of the world when all are there."""
    local_rank: int
    """Among the replicas of its node."""
    num_local: int
    """Replicas of its node."""
    address: str
    """Of its node, for its peers."""
    lighthouse: str
    """host:port where quorums are formed."""
    meeting: str
    """host:port of the store at which those meet that a world begins with."""
    world: str
    num_founders: int
    """How many a world begins with."""
    least_step: int | None
    """None for one that a world begins with. One that comes later takes the state of a peer; and
    never goes on without one that has done so many steps."""


def read_order() -> ReplicaOrder | None:
    """What this process was told, if it is a replica."""
    said = os.environ.get(REPLICA_VARIABLE)
    return ReplicaOrder.model_validate_json(said) if said else None


def give_up(run_directory: Path, life: int) -> None:
    """From here on this life of a replica can commit nothing, and its peers do not wait for it."""
    lives = read_given_up(run_directory) | {life}
    pending = (run_directory / _GIVEN_UP).with_suffix(".tmp")
    pending.write_text(json.dumps(sorted(lives)))
    pending.rename(run_directory / _GIVEN_UP)


def read_given_up(run_directory: Path) -> frozenset[int]:
    """The lives that were given up in the present world."""
    try:
        return frozenset(json.loads((run_directory / _GIVEN_UP).read_bytes()))
    except FileNotFoundError:
        return frozenset()


def clear_given_up(run_directory: Path) -> None:
    """A new world begins, whose token keeps all earlier lives from committing."""
    (run_directory / _GIVEN_UP).unlink(missing_ok=True)


def require_authority(spec: TrainSpec, what: str) -> None:
    """Raise CheckpointError when this world, or this life of a replica, was given up."""
    if read_fencing_token(spec.run_directory) > spec.fencing_token:
        raise CheckpointError(f"{what} is not committed: a later world of this run was started")
    if spec.life is not None and spec.life in read_given_up(spec.run_directory):
        raise CheckpointError(f"{what} is not committed: this replica was given up for lost")
