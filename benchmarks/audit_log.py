"""What the access log costs: CPU time an entry, entries a second, and how much it slows a step.

The reference appends the same entries as plain JSON lines: no tree, no hashes, no lock between
processes, no sequence, synced once in the end. A step is a product of matrices of some
milliseconds, in which a loader's thread would note a few shards; the reference notes none.
"""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.table import Row, publish
from storage.access_log import AccessEntry, AccessLog

REPETITIONS = 5
NUM_ENTRIES = 20_000
NUM_STEPS = 200
ENTRIES_A_STEP = 4
_SIDE = 384


def make_entry(number: int) -> AccessEntry:
    return AccessEntry(
        region="eu",
        action="get",
        object=f"objects/{number:064x}",
        artifact="shard",
        num_bytes=32 << 20,
        decision="allowed",
        reason="residency",
    )


def append_log(directory: Path) -> None:
    log = AccessLog(directory / "access.log")
    for number in range(NUM_ENTRIES):
        log.append(make_entry(number))
    log.close()


def append_lines(directory: Path) -> None:
    with (directory / "lines.jsonl").open("a") as file:
        for number in range(NUM_ENTRIES):
            file.write(json.dumps(make_entry(number).model_dump(mode="json")) + "\n")


def step(directory: Path, entries: int) -> None:
    """NUM_STEPS steps, in each of which so many entries are noted."""
    matrix = np.ones((_SIDE, _SIDE))
    log = AccessLog(directory / "access.log")
    for number in range(NUM_STEPS):
        matrix @ matrix
        for entry in range(entries):
            log.append(make_entry(number * entries + entry))
    log.close()


def measure(work: Callable[[Path], None]) -> tuple[float, float]:
    """CPU and wall seconds of this process, all its threads."""
    with tempfile.TemporaryDirectory() as name:
        cpu, wall = time.process_time(), time.perf_counter()
        work(Path(name))
        return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    works: dict[str, Callable[[Path], None]] = {
        "log": append_log,
        "lines": append_lines,
        "noted": lambda path: step(path, ENTRIES_A_STEP),
        "bare": lambda path: step(path, 0),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for repetition in range(REPETITIONS + 1):
        for name, work in works.items():
            measured = measure(work)
            if repetition:  # the first one warms up
                seconds[name].append(measured)
    cpu = {name: median(c for c, _ in found) for name, found in seconds.items()}
    wall = {name: median(w for _, w in found) for name, found in seconds.items()}
    rows = [
        _row("CPU microseconds an entry", *(1e6 * cpu[n] / NUM_ENTRIES for n in ("log", "lines"))),
        _row("entries a second", *(NUM_ENTRIES / wall[n] for n in ("log", "lines"))),
        _row(
            f"a step with {ENTRIES_A_STEP} entries, against none (milliseconds)",
            *(1e3 * wall[n] / NUM_STEPS for n in ("noted", "bare")),
        ),
    ]
    publish("audit_log", "see the case", rows)


def _row(case: str, ours: float, reference: float) -> Row:
    return Row(
        case=case, ours=ours, reference=reference, ratio=ours / reference, target="", holds=True
    )


if __name__ == "__main__":
    main()
