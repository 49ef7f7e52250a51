"""Errors of the user's own code: what may be said anywhere, and what stays on this machine."""

import contextlib
import errno
import os
import traceback
from collections.abc import Iterator
from pathlib import Path

from data.record import RecordError
from storage.errors import ConvoyError
from training.errors import WorkloadError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class UserCode:
    """Runs the functions of one module and explains what they raise.

    An exception's text may quote a record, so the error that goes on names the exception's type
    and place alone; the traceback with the text is left in `detail`, a file of mode 0600. Convoy's
    own errors, a RecordError's words and a full disk are passed on as they are.
    """

    def __init__(self, module: str, file: str | None, detail: Path) -> None:
        self._module = module
        self._file = file
        self._detail = detail

    @contextlib.contextmanager
    def running(self, function: str) -> Iterator[None]:
        """Explain what the block raises as an error of `function`, for example `loss()`."""
        try:
            yield
        except Exception as error:
            raise self.explain(error, function) from None

    def explain(self, error: Exception, function: str, when: str = "") -> Exception:
        """The error to raise, `from None`, instead of one that the user's code raised."""
        if isinstance(error, ConvoyError):
            return error
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            return error
        where = f"{self._module}.{function}"
        if isinstance(error, RecordError):
            return WorkloadError(f"{where}: {error}")
        said = f"{where}{when} raised {type(error).__name__} at {self._find_place(error)}"
        try:
            write_private(self._detail, "".join(traceback.format_exception(error)))
        except OSError as unwritable:
            return WorkloadError(f"{said}; its text could not be kept ({unwritable.strerror})")
        return WorkloadError(f"{said}; its text is in {self._detail}", detail=self._detail)

    def _find_place(self, error: Exception) -> str:
        """The last line of the user's file that was running, or else of any file."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == self._file]
        frame = (own or frames)[-1]
        return f"{Path(frame.filename).name}:{frame.lineno}"


def write_private(path: Path, text: str) -> None:
    """Write a file anew that its owner alone can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
