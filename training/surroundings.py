"""What a simulated node has of its own beside its network: a small disk, and a clock.

Both are processes' own, a tmpfs in a mount namespace and a preloaded libfaketime, and go with them.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TRY_SECONDS = 30.0
_FILLER = ".fill"
_BLOCK = bytes(1 << 20)


@dataclass(frozen=True)
class Mount:
    """A tmpfs that one process and its descendants see, and nobody else."""

    directory: Path
    options: str = "mode=0700"


def see_mounts(mounts: Sequence[Mount]) -> tuple[str, ...]:
    """What is put before a command that is to see these."""
    if not mounts:
        return ()
    made = [
        f"mount -t tmpfs -o {one.options} convoy-disk {shlex.quote(str(one.directory))}"
        for one in mounts
    ]
    script = " && ".join([*made, 'exec "$@"'])
    return ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")


def find_mount_problem(directory: Path) -> str | None:
    """Why nobody can have a mount of his own there; None where one can."""
    try:
        done = subprocess.run(
            [*see_mounts([Mount(directory)]), "true"],
            capture_output=True,
            text=True,
            timeout=_TRY_SECONDS,
        )
    except FileNotFoundError:
        return "`unshare` of util-linux is not installed"
    return done.stderr.strip() or "it cannot be mounted" if done.returncode else None


@dataclass(frozen=True)
class Disk:
    """A disk of so many MiB for each node, over one directory."""

    directory: Path
    size_mib: int

    @property
    def mount(self) -> Mount:
        return Mount(self.directory, f"mode=0700,size={self.size_mib}m")

    def fill(self, pid: int) -> None:
        """Leave no byte free on the disk of the node that this process is of."""
        with (self._seen_by(pid) / _FILLER).open("ab", buffering=0) as file:
            with suppress(OSError):  # the disk is full: that is the aim
                while file.write(_BLOCK) == len(_BLOCK):
                    pass
            with suppress(OSError):
                while file.write(b"\0" * 4096):
                    pass

    def empty(self, pid: int) -> None:
        """Make the room free again."""
        (self._seen_by(pid) / _FILLER).unlink(missing_ok=True)

    def _seen_by(self, pid: int) -> Path:
        return Path(f"/proc/{pid}/root{self.directory}")


class Clocks:
    """A wall clock for each node; the monotonic clock never jumps, here as elsewhere."""

    def __init__(self, directory: Path, library: Path) -> None:
        self._directory = directory
        self._library = library
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def mount(self) -> Mount:
        """libfaketime leaves things in shared memory when its process is killed: the node's own."""
        return Mount(Path("/dev/shm"))

    def prefix(self, node: int) -> tuple[str, ...]:
        """What is put before a node's command to give it its clock."""
        if not self._file(node).exists():
            self.move(node, 0.0)
        return ("env", *(f"{k}={v}" for k, v in _fake(self._library, self._file(node)).items()))

    def move(self, node: int, seconds: float) -> None:
        """Have the clock show another time, so far from the true one, within a second or so."""
        pending = self._file(node).with_suffix(".tmp")
        pending.write_text(f"{seconds:+f}\n")
        pending.rename(self._file(node))

    def _file(self, node: int) -> Path:
        return self._directory / f"node-{node}"


def find_clock_library(directory: Path) -> tuple[Path | None, str]:
    """A libfaketime that works here, and else why there is none.

    The one of Debian 12 (0.9.10) does not: sleeps fail under it when the monotonic clock is left
    alone. The package `libfaketime` brings a later one.
    """
    candidates: list[Path] = []
    if spec := importlib.util.find_spec("libfaketime"):
        for place in spec.submodule_search_locations or ():
            candidates += Path(place).rglob("libfaketime.so.1")
    candidates += Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    if not candidates:
        return None, "libfaketime is not installed: `pip install libfaketime`"
    directory.mkdir(parents=True, exist_ok=True)
    probe = directory / "probe"
    probe.write_text("+3600\n")
    code = "import time; m = time.monotonic(); time.sleep(0.01); print(time.time(), m)"
    for library in candidates:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **_fake(library, probe)},
            capture_output=True,
            text=True,
            timeout=_TRY_SECONDS,
        )
        if done.returncode == 0 and not done.stderr:
            return library, ""
    return None, f"{candidates[0]} does not work here: `pip install libfaketime` brings a later one"


def _fake(library: Path, file: Path) -> dict[str, str]:
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
