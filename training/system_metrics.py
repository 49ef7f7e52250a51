"""What a training takes of its machine, sampled from beside it while it runs."""

import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from training.activity import read_activity
from training.heartbeat import read_beats
from training.outbox import Outbox

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SystemMeter:
    """Notes metrics for MLflow every so many seconds, from a thread: no step waits for it.

    Their names begin with `system/`, as those that MLflow itself takes do. The ranks' are of those
    that run at the time of the sample.
    """

    def __init__(self, outbox: Outbox, run_directory: Path, seconds: float) -> None:
        self._outbox = outbox
        self._directory = run_directory
        self._seconds = seconds
        self._before: dict[int, float] = {}
        self._sampled = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-metrics", daemon=True)

    def __enter__(self) -> "SystemMeter":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(self._seconds):
            with suppress(OSError):  # a full disk, say: the training itself will tell
                self._outbox.note_metrics(self.sample())

    def sample(self) -> dict[str, float]:
        """By name, since the last call: 100 % of the processor is one core."""
        pids = [beat.pid for beat in read_beats(self._directory)]
        now, used = time.monotonic(), {pid: read_activity(pid).cpu_seconds for pid in pids}
        spent = sum(max(0.0, used[pid] - self._before.get(pid, used[pid])) for pid in pids)
        elapsed, self._sampled, self._before = now - self._sampled, now, used
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(memory[n].split()[0]) for n in ("MemTotal", "MemAvailable"))
        return {
            "system/ranks_cpu_percentage": 100 * spent / elapsed,
            "system/ranks_memory_megabytes": sum(map(_read_resident_bytes, pids)) / 1e6,
            "system/system_memory_usage_percentage": 100 * (1 - available / total),
            "system/disk_available_megabytes": shutil.disk_usage(self._directory).free / 1e6,
        }


def _read_resident_bytes(pid: int) -> int:
    with suppress(OSError):  # it is gone
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0
