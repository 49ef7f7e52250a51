"""Progress and results on a terminal, and as plain lines in a log."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pipeline import progress

_LINE_SECONDS = 5.0

console = Console(stderr=True)


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """Bars on a terminal; one line every five seconds and at each stage's end elsewhere."""
    if not console.is_terminal:
        with progress.listening(_Lines()):
            yield
        return
    bars = Progress(
        TextColumn("[bold]{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=console,
    )
    with bars, progress.listening(_Bars(bars)):
        yield


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._ids: dict[str, TaskID] = {}

    def __call__(self, report: progress.Progress) -> None:
        if report.stage not in self._ids:
            self._ids[report.stage] = self._bars.add_task(report.stage, unit="", note="")
        self._bars.update(
            self._ids[report.stage],
            completed=report.done,
            total=report.total,
            unit=report.unit,
            note=report.note,
        )


class _Lines:
    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, report: progress.Progress) -> None:
        now = time.monotonic()
        if now - self._shown < _LINE_SECONDS and report.done != report.total:
            return
        self._shown = now
        total = f"/{report.total}" if report.total else ""
        line = f"{report.stage}: {report.done}{total} {report.unit} {report.note}".rstrip()
        print(line, file=sys.stderr, flush=True)
