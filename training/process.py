"""Processes that never outlive who started them, that bear a name, and that are known again."""

import os
import select
import signal
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
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


def die_with_ancestor(death_signal: signal.Signals, variable: str) -> None:
    """Send this process `death_signal` when the process that set an environment variable ends.

    That is the nearest one above that does not have it itself. Between the two may stand shells,
    which go on when it is killed: some replace themselves by the command, dash does not.
    """
    ancestor = parent = os.getppid()
    try:
        while _was_given(ancestor, variable):
            ancestor = _read_parent_of(ancestor)
        if ancestor == parent:
            die_with_parent(death_signal, parent)
            return
        descriptor = os.pidfd_open(ancestor)
    except (FileNotFoundError, ProcessLookupError):  # gone meanwhile
        os.kill(os.getpid(), death_signal)
        return

    def watch() -> None:
        select.select([descriptor], [], [])  # readable once the process has ended
        os.kill(os.getpid(), death_signal)

    threading.Thread(target=watch, name="convoy-ancestor", daemon=True).start()


def read_parent() -> int:
    """The process that started this one, as it named itself."""
    return int(os.environ[PARENT_VARIABLE])


def find_descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # gone meanwhile
                pid_here = int(entry.name)
                children.setdefault(_read_parent_of(pid_here), []).append(pid_here)
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _read_parent_of(pid: int) -> int:
    content = Path(f"/proc/{pid}/stat").read_text()
    # The name, in parentheses, may hold anything.
    return int(content[content.rindex(")") + 2 :].split()[1])


def _was_given(pid: int, variable: str) -> bool:
    """Whether a process was started with an environment variable."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # another user's
        return False
    return any(one.startswith(f"{variable}=".encode()) for one in environment.split(b"\0"))


def set_name(name: str) -> None:
    """What `ps -o comm` and `top` show of this process; 15 bytes are kept."""
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, value: "int | bytes") -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told from every other that had or will have its number."""

    machine: str
    """Host name and process-number space: containers on one machine have several."""
    boot: str
    """Of the machine's kernel."""
    pid: int
    started_ticks: int
    """After the boot."""

    def is_alive(self) -> bool | None:
        """Whether it still runs; None when that cannot be told, for it is of another machine."""
        if self.machine != _name_machine():
            return None
        if self.boot != _read_boot():
            return False
        return _read_started_ticks(self.pid) == self.started_ticks


def identify_process(pid: int) -> ProcessIdentity:
    """A process of this machine. Raises ProcessLookupError when there is none."""
    started = _read_started_ticks(pid)
    if started is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(_name_machine(), _read_boot(), pid, started)


def started_seconds(pid: int) -> float | None:
    """When a process of this machine began, in seconds since 1970; None when there is none."""
    ticks = _read_started_ticks(pid)
    if ticks is None:
        return None
    boot = next(
        line.split()[1]
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    return int(boot) + ticks / os.sysconf("SC_CLK_TCK")


def _name_machine() -> str:
    return f"{socket.gethostname()}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _read_boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _read_started_ticks(pid: int) -> int | None:
    """When the process began; None when it has ended, as one that nobody waited for has too."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Behind the name, which can hold anything: state is field 3 and the start field 22 (proc(5)).
    state, *fields = content[content.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(fields[18])
