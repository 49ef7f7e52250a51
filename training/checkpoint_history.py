"""The step log as a part of the checkpoint: a lost disk loses no line of the curve."""

from pathlib import Path
from typing import Any


class StepHistory:
    """A file that goes with the checkpoint and is put back where it is missing.

    `Stateful`, as DCP calls it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        return {"content": self._path.read_text() if self._path.exists() else ""}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._path.exists():
            self._path.write_text(state_dict["content"])
