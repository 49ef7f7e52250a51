"""Errors of the user's own code: what may be said anywhere, and what stays on this machine."""

import os
import traceback
from pathlib import Path

from pipeline.workspace import STATE
from training.errors import WorkloadError


def explain_user_error(error: Exception, where: str) -> WorkloadError:
    """An error that names the exception's type and place; its text, which may quote a record,
    is in a file of mode 0600 in the workspace.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = (STATE / "logs" / "user-error.txt").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    return WorkloadError(
        f"{where} raised {type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}; "
        f"the whole traceback is in {path}",
        detail=path,
    )
