"""Sends what the Prefect UI shows from a thread of its own.

So no step and no stage waits for the API, and one that is away harms nothing but the view.
"""

import contextvars
import queue
import threading
import time
from collections.abc import Callable
from logging import Logger, LoggerAdapter
from typing import Any

import httpx
from pydantic import BaseModel

from pipeline.progress import Progress
from tasks.artifacts import ProgressArtifact, Rows, publish, publish_stages

_CLOSE_SECONDS = 240.0
_PAUSE_SECONDS = 2.0


class Publisher:
    """Shows progress and results of one flow run. Leaving the context waits for what is on its way,
    for at most four minutes, and raises what went wrong but for an API that was away."""

    def __init__(self, logger: "Logger | LoggerAdapter[Any]") -> None:
        self._logger = logger
        self._artifact = ProgressArtifact()
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._begun: set[str] = set()
        self._latest: dict[str, Progress] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)

    def __enter__(self) -> "Publisher":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._orders.put(None)
        # A run that is being ended has no time for it.
        self._thread.join(_CLOSE_SECONDS if kind is None or issubclass(kind, Exception) else 0.5)
        if self._thread.is_alive():
            self._logger.warning("the Prefect API is away: some artifacts are missing there")
        if self._error is not None and kind is None:
            raise self._error

    def show(self, progress: Progress) -> None:
        """Show how far a stage is: first where it begins, then of what waits the newest alone."""
        if not progress.total:
            return  # nothing to draw
        if progress.stage not in self._begun:
            self._begun.add(progress.stage)
            self._order(lambda: self._show(progress))
            return
        with self._lock:
            waits = progress.stage in self._latest
            self._latest[progress.stage] = progress
        if not waits:
            self._order(lambda: self._show_latest(progress.stage))

    def _show_latest(self, stage: str) -> None:
        with self._lock:
            progress = self._latest.pop(stage)
        self._show(progress)

    def _show(self, progress: Progress) -> None:
        try:
            self._artifact.show(progress)
        except httpx.TransportError:
            return  # the next one says more

    def publish(self, result: BaseModel, tracking_uri: str) -> None:
        """Show what a stage left."""
        self._order(lambda: publish(result, tracking_uri))

    def publish_stages(self, rows: Rows) -> None:
        """Show which stages ran."""
        self._order(lambda: publish_stages(rows))

    def _order(self, call: Callable[[], None]) -> None:
        # Prefect finds the flow and task run of an artifact in the caller's context.
        context = contextvars.copy_context()
        self._orders.put(lambda: context.run(call))

    def _work(self) -> None:
        while (call := self._orders.get()) is not None:
            try:
                while not self._send(call):
                    time.sleep(_PAUSE_SECONDS)
            except Exception as error:
                self._error = self._error or error

    def _send(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except httpx.TransportError:
            return False
        return True
