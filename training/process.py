"""Processes that never outlive who started them, and that bear a name."""

import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


PARENT_VARIABLE = "CONVOY_PARENT"
"""Environment variable by which a process names itself to those that it starts."""


def die_with_parent(death_signal: signal.Signals, parent: int) -> None:
    """Have the kernel send this process `death_signal` when its parent ends, however it ends.

    `parent` is the process that started this one: it may be gone before this is called, and then
    the signal comes at once.
    """
    _prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def read_parent() -> int:
    """The process that started this one, as it named itself."""
    return int(os.environ[PARENT_VARIABLE])


def find_descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # gone meanwhile
                content = (entry / "stat").read_text()
                # The name, in parentheses, may hold anything.
                parent = int(content[content.rindex(")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def set_name(name: str) -> None:
    """What `ps -o comm` and `top` show of this process; 15 bytes are kept."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: "int | bytes") -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
