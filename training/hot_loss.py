"""Replicas of a hot world, and why those that were lost were."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from training.hang import Hang
from training.incidents import Cause, Incident, explain_failure
from training.node import WorldEnd
from training.world import World, log_directory


@dataclass
class Replica:
    """One start of a replica."""

    number: int
    node: int
    life: int
    name: str
    started: float = field(default_factory=time.monotonic)
    hang: Hang | None = None
    gone: float | None = None
    last_step: int = 0
    """The newest step of the world when it was lost, or told to end."""
    end: WorldEnd | None = None
    """How it ended; None, once it is gone: with its node."""


def group_losses(gone: Sequence[Replica]) -> list[list[Replica]]:
    """Those of one node that was lost together; the others one by one."""
    groups: dict[object, list[Replica]] = {}
    for replica in gone:
        key = ("node", replica.node) if replica.end is None else replica.life
        groups.setdefault(key, []).append(replica)
    return list(groups.values())


def explain_loss(
    world: World, gone: Sequence[Replica], silenced: Mapping[int, str], starved: bool
) -> Incident:
    """Why these replicas, or one of them, were lost. silenced: nodes that were ended for being out
    of reach, with words. starved: the kernel has ended a process for want of memory meanwhile."""
    spec = world.spec
    ends = [(one.number, one.end.exit_codes) for one in gone if one.end]
    codes = {number: min(codes.values()) for number, codes in ends if codes}
    lost = next((one.node for one in gone if one.end is None and not one.hang), None)
    cause, rank, message = explain_failure(
        spec.run_directory, codes, lost, starved, spec.after_kill
    )
    hung = next((one for one in gone if one.hang), None)
    if lost is not None and lost in silenced:
        cause, rank = "node_lost", None
        message = f"node {lost} was lost: {silenced[lost]}"
    elif hung and hung.hang:
        cause, rank = "hang", hung.number
        message = f"{hung.hang.why}; stacks of the ranks that answered: {world.stacks}"
    elif cause == "killed" and rank is None:
        rank = gone[0].number
        message = f"rank {rank} ended by itself: see its log in {log_directory(spec)}"
    return name_loss(world, cause, message, gone[0].last_step, rank, gone[0].node)


def name_loss(
    world: World,
    cause: Cause,
    message: str,
    step: int,
    rank: int | None = None,
    node: int | None = None,
) -> Incident:
    """An incident of a world that was in this step."""
    return Incident(
        cause=cause,
        rank=rank,
        node=node,
        message=message if cause in ("error", "memory") else f"{message} in step {step}",
        last_step=step,
        seconds=time.monotonic() - world.started,
    )
