"""Progress and results on a terminal, and as plain lines in a log."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from pipeline import progress

_LINE_SECONDS = 5.0

console = Console(stderr=True)


def say(what: str) -> None:
    """Tell who waits at a terminal what is going on; a log needs no such line."""
    if console.is_terminal:
        console.print(f"[dim]{what} ...")


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """Bars on a terminal; one line every five seconds and at each stage's end elsewhere."""
    if not console.is_terminal:
        with progress.listening(_Lines()):
            yield
        return
    bars = Progress(
        TextColumn("[bold]{task.description:>9}"),
        BarColumn(24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
    )
    with bars, progress.listening(_Bars(bars)):
        yield


class _Bars:
    """A bar for each stage that has said something."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._ids: dict[str, TaskID] = {}

    def __call__(self, report: progress.Progress) -> None:
        if report.is_event:
            self._bars.console.print(str(report), highlight=False)
            return
        if report.stage not in self._ids:
            self._ids[report.stage] = self._bars.add_task(
                report.stage, total=None, count="", note=""
            )
        bar = self._ids[report.stage]
        self._bars.update(bar, note=report.note)
        if report.unit:
            self._bars.update(bar, completed=report.done, total=report.total, count=report.count)
        elif report.done == report.total:
            self._bars.update(bar, completed=1, total=1)


class _Lines:
    def __init__(self) -> None:
        self._stage = ""
        self._shown = 0.0

    def __call__(self, report: progress.Progress) -> None:
        if report.is_event:
            print(report, file=sys.stderr, flush=True)
            return
        now = time.monotonic()
        soon = report.stage == self._stage and now - self._shown < _LINE_SECONDS
        if soon and report.done != report.total:
            return
        self._stage, self._shown = report.stage, now
        print(report, file=sys.stderr, flush=True)
