"""Follows a step log that is being written, for whoever wants each step once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

OnStep = Callable[[dict[str, float]], None]


class StepFollower:
    """Passes on each step that is added to a step log, once: a world that is resumed cuts its file
    back, by putting another in its place, and makes some steps again."""

    def __init__(self, path: Path, on_step: OnStep, after_step: float | None = None) -> None:
        """after_step: what is beyond it is passed on; None: what is not there yet."""
        self._path = path
        self._on_step = on_step
        self._inode = 0
        self._offset = 0
        self._last_step = -1.0 if after_step is None else after_step
        if after_step is None:
            for line in self._read():
                self._last_step = line["step"]

    def poll(self) -> None:
        """Pass on what came since the last call."""
        for line in self._read():
            if line["step"] > self._last_step:
                self._last_step = line["step"]
                self._on_step(line)

    def _read(self) -> list[dict[str, float]]:
        try:
            status = os.stat(self._path)
            if (status.st_ino, status.st_size) == (self._inode, self._offset):
                return []
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
