"""What a run went through: incidents that it survived, notices of the rest, what each cost, and
where the time went. Kept in the run's directory too, for a call that goes on after this one died.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from training.goodput import Stretch, StretchKind
from training.heartbeat import read_beats
from training.incidents import Incident, Notice, NoticeKind

OnEvent = Callable[[Incident | Notice], None]

ACCOUNT_FILE = "account.json"


class _Kept(BaseModel, frozen=True, extra="forbid"):
    """The account on disk."""

    started: float
    """Of the first call, in seconds of the epoch."""
    ended: float | None
    """When the last call ended in order; None while one runs, or after it was killed."""
    stretches: tuple[Stretch, ...]
    """The last one is what a call that was killed was at, as far as it had written."""
    incidents: tuple[Incident, ...]
    notices: tuple[Notice, ...]


class Account:
    """Kept by the supervisor. `on_event` gets each incident and notice as it comes, before what it
    cost is known. directory: of the run, whose earlier calls are part of the account.
    """

    def __init__(self, on_event: OnEvent, directory: Path | None = None) -> None:
        self._on_event = on_event
        self._path = directory / ACCOUNT_FILE if directory else None
        self._offset = time.time() - time.monotonic()
        self._began = self._started = time.monotonic()
        self._last_progress = self._started
        self._step = 0
        self._num_restarts = 0
        self._incidents: list[Incident] = []
        self._notices: list[Notice] = []
        self._stretches: list[Stretch] = []
        """Those that are over."""
        self._first_step: int | None = None
        """Of the world that makes steps, if one does."""
        self._is_over = False
        self._open: Literal["incident", "notice"] | None = None
        """What the last of it cost is not known: no step has been made since."""
        if directory and self._path and self._path.exists():
            self._resume(directory, _Kept.model_validate_json(self._path.read_bytes()))
        self._keep()

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return tuple(self._incidents)

    @property
    def notices(self) -> tuple[Notice, ...]:
        return tuple(self._notices)

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Up to now; the last one may go on."""
        going_on = () if self._is_over else (self._current(time.monotonic()),)
        return (*self._stretches, *going_on)

    @property
    def num_restarts(self) -> int:
        """Incidents of this call, which count against its budget."""
        return self._num_restarts

    @property
    def step(self) -> int:
        """The newest step that was begun; 0 before the first."""
        return self._step

    @property
    def is_stuck(self) -> bool:
        """Whether no step has been made since the last incident of this call."""
        return self._open == "incident" and self._num_restarts > 0

    @property
    def seconds(self) -> float:
        """Since this call was started."""
        return time.monotonic() - self._began

    def follow(self, first: int, step: int, changed: float) -> None:
        """A world that began with step `first` came to `step` at that time of the monotonic clock.
        With that, what ended the world before is known to have cost."""
        begins = self._first_step is None
        if begins:
            self._stretches.append(self._current(changed))
            self._first_step = first
        self._settle(changed, first)
        self._last_progress, self._step = changed, step
        if begins:
            self._keep()

    def add(self, incident: Incident) -> None:
        """A world has ended by this."""
        if self._open == "incident":  # the steps before it are still to be done again
            last_step = max(incident.last_step, self._incidents[-1].last_step)
            incident = incident.model_copy(update={"last_step": last_step})
        self._settle(time.monotonic())
        self._end_training()
        self._num_restarts += 1
        self._incidents.append(incident)
        self._open = "incident"
        self._keep()
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
        self._end_training()
        self.tell("more_nodes", message)
        self._open = "notice"

    def end(self) -> None:
        """The run is over, or this call of it."""
        self._is_over = True
        now = time.monotonic()
        has_trained = self._first_step is not None
        self._end_training()
        last = self._current(now)
        self._stretches.append(last.model_copy(update={"kind": "ending"}) if has_trained else last)
        self._keep(ended=now + self._offset)

    def _resume(self, directory: Path, kept: _Kept) -> None:
        """Go on with the account of earlier calls: of what the last one was doing when it was
        killed there are the ranks' own words. What was between two calls in order is no part of
        the run."""
        now = time.monotonic()
        self._stretches = list(kept.stretches)
        self._incidents, self._notices = list(kept.incidents), list(kept.notices)
        if kept.ended is not None:
            self._started = now - (kept.ended - kept.started)
            return
        self._started = kept.started - self._offset
        begun = [beat for beat in read_beats(directory) if beat.step and beat.changed <= now]
        self._last_progress = self._started + (kept.stretches[-1].ends if kept.stretches else 0.0)
        if begun and kept.stretches and kept.stretches[-1].kind == "training":
            # They read the clock of this boot of the machine; from before it there are none.
            self._last_progress = max(self._last_progress, max(b.changed for b in begun))
            self._step = max(beat.step for beat in begun)
            self._stretches[-1] = kept.stretches[-1].model_copy(
                update={"ends": self._last_progress - self._started, "last_step": self._step}
            )
        away = now - self._last_progress
        incident = Incident(
            cause="killed",
            rank=None,
            message=f"the process that trains was ended in step {self._step}, and trains again "
            f"{away:.0f} s later",
            last_step=self._step,
            seconds=self._last_progress - self._started,
        )
        self._incidents.append(incident)
        self._open = "incident"
        self._on_event(incident)

    def _settle(self, now: float, first: int | None = None) -> None:
        """What is open has cost the time until now, and the steps from `first` on."""
        seconds = max(0.0, now - self._last_progress)
        if self._open == "incident":
            last = self._incidents[-1]
            steps = 0 if first is None else max(0, last.last_step - first)
            self._incidents[-1] = last.model_copy(
                update={"steps_lost": steps, "seconds_lost": seconds}
            )
            if steps:
                self._note_lost(steps)
        elif self._open == "notice":
            self._notices[-1] = self._notices[-1].model_copy(update={"seconds_lost": seconds})
        if self._open:
            self._open = None
            self._last_progress = now

    def _note_lost(self, steps: int) -> None:
        for number in range(len(self._stretches) - 1, -1, -1):
            stretch = self._stretches[number]
            if stretch.kind == "training":
                self._stretches[number] = stretch.model_copy(update={"lost_steps": steps})
                return

    def _end_training(self) -> None:
        """A world has made its last step."""
        if self._first_step is not None:
            self._stretches.append(self._current(self._last_progress))
            self._first_step = None

    def _current(self, now: float) -> Stretch:
        """What goes on, up to now."""
        begins = self._stretches[-1].ends if self._stretches else 0.0
        if self._first_step is not None:
            return Stretch(
                kind="training",
                begins=begins,
                ends=max(begins, self._last_progress - self._started),
                first_step=self._first_step,
                last_step=max(self._first_step, self._step),
            )
        is_late = self._open and any(s.kind == "training" for s in self._stretches)
        kind: StretchKind = "recovering" if is_late else "starting"
        return Stretch(kind=kind, begins=begins, ends=max(begins, now - self._started))

    def _keep(self, ended: float | None = None) -> None:
        if self._path is None:
            return
        kept = _Kept(
            started=self._started + self._offset,
            ended=ended,
            stretches=self.stretches,
            incidents=self.incidents,
            notices=self.notices,
        )
        pending = self._path.with_suffix(".tmp")
        pending.write_text(kept.model_dump_json(indent=1))
        pending.rename(self._path)
