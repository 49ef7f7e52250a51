"""What is done when processes and nodes die, and what lies between the nodes. Loads no torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat, model_validator


class RecoveryConfig(BaseModel, frozen=True, extra="forbid"):
    """What is done when processes and nodes die or hang."""

    mode: Literal["restart", "hot"] = "restart"
    """restart: all workers start again from the last checkpoint. hot: each worker is a replica of
    its own (torchft); where one dies the others go on without a restart, and the one that takes its
    place gets its state from a peer. When which: docs/recovery.md."""
    retried: tuple[Literal["killed", "node_lost", "hang", "memory", "error"], ...] = (
        "killed",
        "node_lost",
        "hang",
    )
    """Causes after which the workers are started again from the last checkpoint. Those of the
    code, `error` and `memory`, would be met again."""
    wait_seconds: PositiveFloat = 120.0
    """How long `min_nodes` nodes are waited for."""
    patience_seconds: PositiveFloat = 600.0
    """How long loading data, saving or starting may take without progress. Within a step three
    median steps and a second are a hang."""
    straggler_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """A rank whose own part of a step takes so many times as long as that of the others is named,
    with its lateness. Nothing else is done about it."""
    exclude_seconds: NonNegativeFloat = 10.0
    """How long the place of a lost node stays empty, where `min_nodes` can go on without it. It
    doubles with every loss of that node."""
    longest_exclude_seconds: NonNegativeFloat = 600.0
    """Most that a place stays empty."""
    longest_backoff_seconds: NonNegativeFloat = 60.0
    """Most that is waited before a start, after starts that came to no step. The waits double."""


class NetworkConfig(BaseModel, frozen=True, extra="forbid"):
    """What lies between the nodes of this machine."""

    namespaces: bool = False
    """Each node has a network namespace of its own, with an address and a link that can be cut and
    slowed, for tests and to debug: it takes iproute2 and the right to make namespaces, and falls
    back to the shared loopback device without them. Such a node reaches the others and nothing
    else, so that region and keys must be on this machine's disk."""
    rate_mbit: PositiveFloat | None = None
    """Megabits a second that each node's link lets through in each direction; null has no limit."""
    lost_seconds: PositiveFloat = 5.0
    """A node that has not answered over its link for so long is lost."""

    @model_validator(mode="after")
    def _links_exist(self) -> "NetworkConfig":
        if self.rate_mbit and not self.namespaces:
            raise ValueError(
                "rate_mbit is of the links that namespaces make: set namespaces to true, or leave "
                "rate_mbit out"
            )
        return self
