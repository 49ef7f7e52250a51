"""What a stage says of itself while it works: whoever called it may listen."""

import contextlib
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

    @property
    def count(self) -> str:
        """`30/100 steps`; empty when there is nothing to count."""
        total = f"/{self.total:,}" if self.total else ""
        return f"{self.done:,}{total} {self.unit}" if self.unit else ""

    def __str__(self) -> str:
        return f"{self.stage}: " + ", ".join(filter(None, (self.count, self.note)))


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


def current_listener() -> Listener | None:
    """Who listens now, for one that wants to pass on what it hears."""
    return _listener.get()
