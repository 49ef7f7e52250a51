"""What a dataset's size costs before any data is read: its manifest and its order.

A manifest of 100,000 shards is opened; a batch of 1,024 samples is taken from the order of 10
billion samples at the start and at the end of an epoch, and from one of 10 million. No data exists.
"""

import hashlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, publish
from data.manifest import Manifest, read_manifest
from data.order import SampleOrder
from data.shard import Shard

NUM_SHARDS = 100_000
SHARD_SAMPLES = 100_000
BATCH = 1024
WINDOW = 512
REPETITIONS = 5
BATCHES = 100
MAX_SECONDS = 2.0
MAX_MIB = 200.0
SAME = 1.25
"""Ratio up to which two medians of the same cost differ on a busy machine."""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "manifest.json"
        path.write_bytes(_make_manifest().content)
        opened = [_in_fresh_process(lambda: _open(path)) for _ in range(REPETITIONS)]
    seconds = median(seconds for seconds, _ in opened)
    mib = median(mib for _, mib in opened)
    publish("scale", "CPU s", [_limit("open 100,000 shards", seconds, MAX_SECONDS)])
    publish("scale_memory", "MiB", [_limit("open 100,000 shards, peak growth", mib, MAX_MIB)])
    publish("scale_order", "us a batch", _compare_batches())


def _make_manifest() -> Manifest:
    return Manifest(
        dataset="bench",
        shards=tuple(
            Shard(
                name=f"train-EU-{number:05d}.arrow",
                digest=hashlib.sha256(str(number).encode()).hexdigest(),
                split="train",
                jurisdiction="EU",
                num_records=SHARD_SAMPLES,
                num_bytes=200_000_000,
            )
            for number in range(NUM_SHARDS)
        ),
    )


def _open(path: Path) -> tuple[float, float]:
    """CPU seconds (it has one thread), and MiB that the peak of resident memory grew by."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    manifest = read_manifest(path)
    assert len(manifest.digest) == 64
    seconds = time.process_time() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def _in_fresh_process(task: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    here, there = multiprocessing.Pipe(duplex=False)
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: there.send(task()))
    process.start()
    found: tuple[float, float] = here.recv()
    process.join()
    return found


def _compare_batches() -> list[Row]:
    large = SampleOrder([SHARD_SAMPLES] * NUM_SHARDS, seed=1, window=WINDOW)
    small = SampleOrder([SHARD_SAMPLES // 10] * (NUM_SHARDS // 100), seed=1, window=WINDOW)
    reach = BATCH * BATCHES
    cases = {
        "10 billion samples, start of the epoch": (large, 0),
        "10 billion samples, end of the epoch": (large, large.num_samples - reach),
        "10 million samples": (small, 0),
    }
    times: dict[str, list[float]] = {case: [] for case in cases}
    for _ in range(REPETITIONS):
        for case, (order, start) in cases.items():
            times[case].append(_microseconds(order, start))
    first, last, few = (median(times[case]) for case in cases)
    return [
        _same("10 billion samples, end of the epoch against its start", last, first),
        _same("10 billion samples against 10 million", first, few),
    ]


def _microseconds(order: SampleOrder, start: int) -> float:
    order.slice(start, start + 1)  # the epoch's permutation of shards is made once an epoch
    times: list[float] = []
    for number in range(BATCHES):
        started = time.perf_counter()
        order.slice(start + number * BATCH, start + (number + 1) * BATCH)
        times.append(time.perf_counter() - started)
    return median(times) * 1e6


def _limit(case: str, ours: float, limit: float) -> Row:
    return Row(case, ours, limit, ours / limit, f"ours < {limit:g}", ours < limit)


def _same(case: str, ours: float, reference: float) -> Row:
    ratio = ours / reference
    return Row(case, ours, reference, ratio, f"ratio < {SAME}", ratio < SAME)


if __name__ == "__main__":
    main()
