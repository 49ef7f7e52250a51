"""What is to go wrong in a run, and when: drawn from a seed."""

import random
from collections.abc import Collection
from dataclasses import dataclass

STAGES = ("ingest", "shard", "upload", "train", "evaluate", "register")
LATER = ("upload", "train", "evaluate", "register")

WORLD = ("train",)
"""Stages that have ranks, agents and nodes."""

WORLDS = ("restored", "fewer", "hot")
"""What goes on when a part of it is lost: all of it from a commit, those who are left from a
commit, or those who are left without a restart."""

SERVERS = "servers"
"""Of the stores and of their keys."""
LINKS = "links"
"""Of the nodes, each in a network namespace of its own."""


@dataclass(frozen=True)
class Kind:
    """Something that goes wrong."""

    victim: str
    action: str
    """kill: SIGKILL. stop: SIGSTOP, for good. pause: SIGSTOP, and SIGCONT after a while. cut: its
    link is down for a while."""
    stages: tuple[str, ...] = STAGES
    weight: int = 1
    """How often it is drawn, in proportion to the others."""
    needs: str = ""
    """What of the site: `SERVERS`, `LINKS`, or neither."""

    @property
    def name(self) -> str:
        return f"{self.victim} {self.action}"


KINDS = (
    Kind("rank", "kill", WORLD, 6),
    Kind("rank", "stop", WORLD, 3),
    Kind("rank", "pause", WORLD, 2),
    Kind("agent", "kill", WORLD, 5),
    Kind("agent", "stop", WORLD),
    Kind("node", "kill", WORLD, 4),
    Kind("node", "stop", WORLD),
    Kind("node", "cut", WORLD, 4, LINKS),
    Kind("switch", "kill", WORLD, 1, LINKS),
    Kind("meeting", "kill", WORLD),
    Kind("supervisor", "kill", WORLD, 2),
    Kind("supervisor", "pause", WORLD, 2),
    Kind("flow run", "kill", STAGES, 3),
    Kind("flow run", "pause", STAGES, 2),
    Kind("worker", "kill", STAGES, 2),
    Kind("worker", "pause", STAGES),
    Kind("prefect", "kill", STAGES, 2),
    Kind("prefect", "pause", STAGES, 2),
    Kind("mlflow", "kill", LATER, 2),
    Kind("mlflow", "pause", LATER, 2),
    Kind("machine", "kill", STAGES, 2),
    Kind("s3", "kill", LATER, 3, SERVERS),
    Kind("s3", "pause", LATER, 3, SERVERS),
    Kind("key service", "kill", LATER, 3, SERVERS),
    Kind("key service", "pause", LATER, 3, SERVERS),
)


_CALLERS = ("flow run", "worker", "machine")
"""Who calls the stages, and DVC after them."""
_PAUSES_SECONDS = {"pause": (0.2, 1.0, 4.0), "cut": (0.5, 3.0, 10.0)}
"""Some of them below the patience of who waits for the victim, some above."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a moment of the flow."""

    kind: Kind
    stage: str
    after_seconds: float = 0.0
    """Of the stage; in training, of being at the step."""
    step: int = 0
    """Of training, that a rank is in; 0 in other stages."""
    in_save: bool = False
    """Once a checkpoint is being written."""
    at_end: bool = False
    """Once training has written that it is finished, and DVC does not know of it yet."""
    choice: float = 0.0
    """Which of several victims, from 0 to 1."""
    pause_seconds: float = 0.0


def draw_faults(
    rng: random.Random,
    num_world: int,
    num_others: int,
    num_steps: int,
    stage_seconds: dict[str, float],
    has: Collection[str],
    only: str = "",
) -> list[Fault]:
    """Faults of one run in the order of their moments: so many within the world of ranks, so many
    of all else. has: which of SERVERS and LINKS the site has. only: what the kinds' names have in
    common."""
    possible = [kind for kind in KINDS if only in kind.name and kind.needs in ("", *has)]
    world = [kind for kind in possible if kind.stages == WORLD]
    others = [kind for kind in possible if kind.stages != WORLD]
    kinds = _draw_kinds(rng, world, num_world) + _draw_kinds(rng, others, num_others)
    faults = [_draw_moment(rng, kind, num_steps, stage_seconds) for kind in kinds]
    return sorted(faults, key=lambda f: (STAGES.index(f.stage), f.step, f.after_seconds))


def _draw_kinds(rng: random.Random, kinds: list[Kind], number: int) -> list[Kind]:
    return rng.choices(kinds, [kind.weight for kind in kinds], k=number) if kinds else []


def _draw_moment(
    rng: random.Random, kind: Kind, num_steps: int, stage_seconds: dict[str, float]
) -> Fault:
    stage = rng.choice(kind.stages)
    pauses = _PAUSES_SECONDS.get(kind.action)
    pause_seconds = rng.choice(pauses) if pauses else 0.0
    choice = rng.random()
    if stage == "train":
        at_end = kind.victim in _CALLERS and rng.random() < 0.3
        return Fault(
            kind,
            stage,
            after_seconds=rng.uniform(0.0, 0.1),
            step=num_steps if at_end else rng.randrange(1, num_steps),
            in_save=rng.random() < 0.25,
            at_end=at_end,
            choice=choice,
            pause_seconds=pause_seconds,
        )
    after = rng.uniform(0.0, stage_seconds[stage])
    return Fault(kind, stage, after_seconds=after, choice=choice, pause_seconds=pause_seconds)
