"""What a stage says of itself while it works: whoever called it may listen."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    stage: str
    done: int
    total: int | None
    """None while it is not known."""
    unit: str
    note: str = ""
    """What else is worth a look, for example the loss."""
    is_event: bool = False
    """Something that happened, and no further count: to be shown in any case."""

    @property
    def count(self) -> str:
        """`30/100 steps`; empty when there is nothing to count."""
        total = f"/{self.total:,}" if self.total else ""
        return f"{self.done:,}{total} {self.unit}" if self.unit else ""

    def __str__(self) -> str:
        return f"{self.stage}: " + ", ".join(filter(None, (self.count, self.note)))


_RATE_SECONDS = 10.0

Listener = Callable[[Progress], None]

_listener: ContextVar[Listener | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have the stages called in this block report to the listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report(stage: str, done: int, total: int | None, unit: str, note: str = "") -> None:
    """Tell the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(Progress(stage, done, total, unit, note))


def report_event(stage: str, what: str) -> None:
    """Tell the listener, if there is one, of something that happened."""
    listener = _listener.get()
    if listener is not None:
        listener(Progress(stage, 0, None, "", what, is_event=True))


class Transfer:
    """Things of known sizes on their way: reports how many, how much, how fast and how long yet."""

    def __init__(
        self,
        stage: str,
        unit: str,
        num_items: int,
        num_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._unit = unit
        self._num_items = num_items
        self._num_bytes = num_bytes
        self._items = 0
        self._bytes = 0
        self._clock = clock
        self._seen = deque([(clock(), 0)])

    def skip(self, num_items: int, num_bytes: int) -> None:
        """Count what needs not be sent."""
        self._items += num_items
        self._num_bytes -= num_bytes
        self._report()

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        self._bytes += num_bytes
        self._report()

    def finish(self, num_items: int) -> None:
        """Count things that are whole at their place."""
        self._items += num_items
        self._report()

    def _report(self) -> None:
        report(self._stage, self._items, self._num_items, self._unit, self._note())

    def _note(self) -> str:
        if not self._bytes:
            return ""
        now = self._clock()
        self._seen.append((now, self._bytes))
        while len(self._seen) > 2 and now - self._seen[1][0] >= _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        note = f"{self._bytes / 1e6:,.1f}/{self._num_bytes / 1e6:,.1f} MB"
        rate = (self._bytes - before) / (now - since) if now > since else 0.0
        if not rate:
            return note
        left = (self._num_bytes - self._bytes) / rate
        return f"{note}, {rate / 1e6:,.1f} MB/s, {describe_seconds(left)} left"


def describe_seconds(seconds: float) -> str:
    """`3:05`, or `1:03:05` from an hour on."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def current_listener() -> Listener | None:
    """Who listens now, for one that wants to pass on what it hears."""
    return _listener.get()
