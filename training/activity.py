"""Whether a process works, waits for a processor, or waits for another: as its kernel counts it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Places in /proc/PID/stat, counted from the state.
_MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 9, 11, 12
_BUSY_SHARE = 0.2
_BUSY_BYTES = 4096
"""More than whoever looks for a silent node sends."""


@dataclass(frozen=True)
class Activity:
    """What a process has done since it was started. A wait for another process adds to none of it,
    and a process that is gone has none."""

    cpu_seconds: float
    """Of all threads."""
    starved_seconds: float
    """In which threads that still are could have run, and were given no processor."""
    is_runnable: bool
    """Whether a thread runs, or could, at this moment: the wait of one that is not given a
    processor at all is counted only when it is over."""
    page_reads: int
    """Pages that it had to wait for because they were on a disk."""
    link_bytes: int
    """That came over its own links: 0 for a process that shares this one's network namespace, where
    they could be anybody's."""

    def has_gone_on(self, before: "Activity", seconds: float) -> bool:
        """Whether it has been at work, or kept from it by others, since `before`, which was so many
        seconds ago."""
        running = self.cpu_seconds + self.starved_seconds
        running_before = before.cpu_seconds + before.starved_seconds
        return (
            (self.is_runnable and before.is_runnable)
            or running - running_before > _BUSY_SHARE * seconds
            or self.page_reads > before.page_reads
            or self.link_bytes - before.link_bytes > _BUSY_BYTES
        )


def read_activity(pid: int) -> Activity:
    """Of a process, by now."""
    fields = _read_stat(Path(f"/proc/{pid}"))
    if not fields:
        return Activity(0.0, 0.0, False, 0, 0)
    threads = list(_list_threads(pid))
    return Activity(
        cpu_seconds=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_SECOND,
        starved_seconds=sum(_read_starved_seconds(thread) for thread in threads),
        is_runnable=any(_read_stat(thread)[:1] == ["R"] for thread in threads),
        page_reads=int(fields[_MAJOR_FAULTS]),
        link_bytes=_read_link_bytes(pid),
    )


def read_own_seconds(pid: int) -> float:
    """In which the main thread of a process ran, or could have and was given no processor. 0 for a
    process that is gone, and for a kernel that does not count it."""
    with suppress(OSError, IndexError):
        ran, starved = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return (int(ran) + int(starved)) / 1e9
    return 0.0


def read_state(pid: int) -> str:
    """One letter, as `ps` shows it: T for stopped; empty when the process is gone."""
    return "".join(_read_stat(Path(f"/proc/{pid}"))[:1])


def _list_threads(pid: int) -> Iterator[Path]:
    with suppress(FileNotFoundError, ProcessLookupError):
        yield from Path(f"/proc/{pid}/task").iterdir()


def _read_starved_seconds(thread: Path) -> float:
    """0 for a kernel that does not count it."""
    with suppress(OSError, IndexError):
        return int((thread / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _read_link_bytes(pid: int) -> int:
    try:
        if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            return 0
        lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    devices = (line.split(":") for line in lines)
    return sum(int(numbers.split()[0]) for name, numbers in devices if name.strip() != "lo")


def _read_stat(process: Path) -> list[str]:
    """From the state on, of a process or a thread; nothing when it is gone."""
    try:
        content = (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # The name, in parentheses, may hold anything.
    return content[content.rindex(")") + 2 :].split()
