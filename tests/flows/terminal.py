"""A terminal for a command."""

import os
import pty
import subprocess

from tests.workspaces import BIN, Workspace


def run_on_terminal(workspace: Workspace, *command: str) -> str:
    """What a terminal is sent, control sequences included."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, **workspace.environment, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        cwd=workspace.path,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    screen = b""
    while data := _read(ours):
        screen += data
    os.close(ours)
    assert process.wait() == 0, screen.decode()
    return screen.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side is closed
        return b""
