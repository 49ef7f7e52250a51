"""What a run went through: incidents that it survived, notices of the rest, and what each cost."""

import time
from collections.abc import Callable
from typing import Literal

from training.incidents import Incident, Notice, NoticeKind

OnEvent = Callable[[Incident | Notice], None]


class Account:
    """Kept by the supervisor. `on_event` gets each incident and notice as it comes, before what it
    cost is known."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._started = time.monotonic()
        self._last_progress = self._started
        self._step = 0
        self._incidents: list[Incident] = []
        self._notices: list[Notice] = []
        self._open: Literal["incident", "notice"] | None = None
        """What the last of it cost is not known: no step has been made since."""

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    @property
    def notices(self) -> tuple[Notice, ...]:
        return tuple(self._notices)

    @property
    def step(self) -> int:
        """The newest step that was begun; 0 before the first."""
        return self._step

    @property
    def is_stuck(self) -> bool:
        """Whether no step has been made since the last incident."""
        return self._open == "incident"

    @property
    def seconds(self) -> float:
        """Since the run was started."""
        return time.monotonic() - self._started

    def follow(self, first: int, step: int, changed: float) -> None:
        """A world that began with step `first` came to `step` at that time of the monotonic clock.
        With that, what ended the world before is known to have cost."""
        self._settle(changed, first)
        self._last_progress, self._step = changed, step

    def add(self, incident: Incident) -> None:
        """A world has ended by this."""
        self._settle(time.monotonic())
        self._incidents.append(incident)
        self._open = "incident"
        self._on_event(incident)

    def tell(
        self,
        kind: NoticeKind,
        message: str,
        *,
        rank: int | None = None,
        node: int | None = None,
    ) -> None:
        """Something is worth knowing."""
        notice = Notice(
            kind=kind,
            message=message,
            rank=rank,
            node=node,
            step=self._step,
            seconds=self.seconds,
        )
        # Where a world is to begin, the last notice is the one that waits for its first step.
        place = len(self._notices) - (self._open == "notice")
        self._notices.insert(place, notice)
        self._on_event(notice)

    def tell_growth(self, message: str) -> None:
        """A world has made way for a larger one: the time to its first step is lost, no step is."""
        self._settle(time.monotonic())
        self.tell("more_nodes", message)
        self._open = "notice"

    def _settle(self, now: float, first: int | None = None) -> None:
        """What is open has cost the time until now, and the steps from `first` on."""
        seconds = max(0.0, now - self._last_progress)
        if self._open == "incident":
            last = self._incidents[-1]
            steps = 0 if first is None else max(0, last.last_step - first)
            self._incidents[-1] = last.model_copy(
                update={"steps_lost": steps, "seconds_lost": seconds}
            )
        elif self._open == "notice":
            self._notices[-1] = self._notices[-1].model_copy(update={"seconds_lost": seconds})
        if self._open:
            self._open = None
            self._last_progress = now
