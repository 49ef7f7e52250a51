"""Growth of resident memory while a dataset of 0.25 to 2 GB is sharded, and while it is read.

Each in a process of its own, forked from a parent that has everything imported and holds no data;
the growth is of the peak over the start. Whatever the size, it must be the same, and under 300 MiB.
"""

import gc
import multiprocessing
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.samples import BLOCK_TOKENS
from benchmarks.sealed_data import place, write_plain
from benchmarks.table import Row, publish
from data.manifest import Manifest, read_manifest
from training.loader import Loader

SIZES_MB = (256, 512, 1024, 2048)
MAX_MIB = 300.0
BATCH = 32
WINDOW = 4
_RECORD_BYTES = 2 * BLOCK_TOKENS
_RECORDS_PER_SHARD = 2048  # 4 MiB


def main() -> None:
    grown: dict[str, list[float]] = {"sharder": [], "reader": []}
    for size in SIZES_MB:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            grown["sharder"].append(_growth(lambda d=directory, s=size: _shard(d, s)))  # type: ignore[misc]
            _in_process(lambda d=directory: _seal(d))  # type: ignore[misc]
            grown["reader"].append(_growth(lambda d=directory: _read(d)))  # type: ignore[misc]
    publish(
        "memory",
        "MiB",
        [
            Row(
                case=f"{who}, {size} MB of data",
                ours=mib,
                reference=found[0],
                ratio=mib / found[0],
                target=f"ours < {MAX_MIB:g}, against the first: flat",
                holds=mib < MAX_MIB and mib < 1.25 * found[0] + 10,
            )
            for who, found in grown.items()
            for size, mib in zip(SIZES_MB, found, strict=True)
        ],
    )


def _blocks(count: int) -> Iterator[dict[str, Any]]:
    generator = np.random.Generator(np.random.PCG64(1))
    for _ in range(count):
        yield {"tokens": generator.integers(0, 50_000, BLOCK_TOKENS, np.uint16)}


def _shard(directory: Path, size_mb: int) -> None:
    blocks = _blocks(size_mb * 1_000_000 // _RECORD_BYTES)
    manifest = write_plain(blocks, directory / "plain", records_per_shard=_RECORDS_PER_SHARD)
    (directory / "manifest.json").write_bytes(manifest.content)


def _seal(directory: Path) -> None:
    place(_manifest(directory), directory / "plain", directory)
    shutil.rmtree(directory / "plain")


def _read(directory: Path) -> None:
    sealed = place(_manifest(directory), directory / "plain", directory)
    loader = Loader(
        sealed,
        sealed.manifest.shards,
        lambda records: records,  # type: ignore[arg-type, return-value]
        global_batch=BATCH,
        replica=0,
        num_replicas=1,
        seed=1,
        window=WINDOW,
    )
    stop = loader.order.num_samples // BATCH * BATCH
    seen = sum(len(batch) for batch in loader.batches(0, stop))
    assert seen == stop


def _manifest(directory: Path) -> Manifest:
    return read_manifest(directory / "manifest.json")


def _growth(task: Callable[[], None]) -> float:
    """MiB by which resident memory was larger than before, at most, while the task ran."""

    def run(connection: Any) -> None:
        gc.collect()
        before, peak = _resident_bytes(), 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, _resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        task()
        done.set()
        watcher.join()
        connection.send((peak - before) / 2**20)

    here, there = multiprocessing.Pipe(duplex=False)
    _in_process(lambda: run(there))
    return float(here.recv())


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _in_process(task: Callable[[], None]) -> None:
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(target=task)
    process.start()
    process.join()
    assert process.exitcode == 0


if __name__ == "__main__":
    pa.set_cpu_count(1)
    main()
