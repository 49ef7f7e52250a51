"""One start of all workers of a run, and why it ended."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from training.hang import Hang
from training.heartbeat import read_beats
from training.incidents import Incident, explain_failure
from training.memory import count_oom_kills
from training.node import WorldEnd, WorldOrder
from training.spec import WorkerSpec


@dataclass(frozen=True)
class World:
    """One start of the workers, on some of the nodes."""

    number: int
    nodes: tuple[int, ...]
    spec: WorkerSpec
    """As it is cut for these nodes."""
    started: float = field(default_factory=time.monotonic)
    num_oom_kills: int = field(default_factory=count_oom_kills)
    """Of this machine, before it."""

    @property
    def workers_per_node(self) -> int:
        return self.spec.num_workers // len(self.nodes)

    @property
    def stacks(self) -> Path:
        """Where the stacks of its ranks are kept when it hangs."""
        return log_directory(self.spec) / f"hang-{self.number}.txt"

    def find_node(self, rank: int) -> int:
        """On which a rank is."""
        return self.nodes[rank // self.workers_per_node]

    def order(self, node_rank: int, address: str, rendezvous: str, spec_file: Path) -> WorldOrder:
        """What one of its nodes is told to run."""
        return WorldOrder(
            name=f"world-{os.getpid()}-{self.number}",
            num_nodes=len(self.nodes),
            node_rank=node_rank,
            workers_per_node=self.workers_per_node,
            address=address,
            rendezvous=rendezvous,
            worker=self.spec.worker,
            spec=str(spec_file),
            log_directory=str(log_directory(self.spec)),
        )


def log_directory(spec: WorkerSpec) -> Path:
    """Where nodes and ranks write their logs."""
    return spec.run_directory / "logs"


def explain_end(
    world: World,
    ends: Mapping[int, WorldEnd | None],
    hang: Hang | None,
    silenced: Mapping[int, str],
    can_lose: bool,
) -> Incident:
    """Why a world ended: by how its nodes' parts ended (None: the node was lost), by the hang for
    which it was ended, and by the nodes that were ended for being out of reach, with words.
    can_lose: the run could go on with a node less."""
    directory = world.spec.run_directory
    codes: dict[int, int] = {}
    for end in ends.values():
        codes |= end.exit_codes if end else {}
    lost = [node for node, end in ends.items() if end is None]
    cut = [node for node in lost if node in silenced]
    cause, rank, message = explain_failure(
        directory,
        codes,
        lost[0] if lost else None,
        count_oom_kills() > world.num_oom_kills,
        world.spec.after_kill,
        can_lose=can_lose,
    )
    if cut:
        cause, rank, lost = "node_lost", None, cut
        message = f"node {cut[0]} was lost: {silenced[cut[0]]}"
    elif hang:
        cause, rank = "hang", hang.rank
        message = f"{hang.why}; stacks of the ranks that answered: {world.stacks}"
    node = lost[0] if lost else None if rank is None else world.find_node(rank)
    last_step = max((beat.step for beat in read_beats(directory)), default=0)
    return Incident(
        cause=cause,
        rank=rank,
        node=node,
        message=message if cause in ("error", "memory") else f"{message} in step {last_step}",
        last_step=last_step,
        seconds=time.monotonic() - world.started,
    )
