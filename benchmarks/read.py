"""Samples a second over a whole epoch in shuffled order, building the reader included.

Ours reads sealed shards: it decrypts and authenticates every byte, checks each shard's digest, and
gives the global order that is the same at any number of workers. The peers (see readers.py) and
plain pyarrow read plaintext, verify nothing, and shuffle as they do. All give the same: a tensor of
1,024 64-bit integers, or a dict of three fields. In a DataLoader the worker sends batches of 32:
the peers' and pyarrow's as it made them, ours by column, made into the same where they arrive. One
process each, forked from a parent that has everything imported, one torch thread; files in the page
cache; the readers take turns.
"""

import gc
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute  # loads with the first record that is taken
import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks import readers as peers
from benchmarks.samples import text_records, token_blocks
from benchmarks.sealed_data import place, write_plain
from benchmarks.table import Row, publish
from data.sealed_shards import SealedShards
from training.loader import Loader

REPETITIONS = 3
DATA_BYTES = 100_000_000
"""Of a quarter of this, an epoch of the fastest would be its start for the most part."""
BATCH = 32
WINDOW = 4
TARGETS = {
    ("tokens", "direct"): 4.0,
    ("JSON", "direct"): 2.0,
    ("tokens", "DataLoader"): 1.5,
    ("JSON", "DataLoader"): 1.5,
}
PYARROW_TARGET = 0.8

Samples = Iterator[Any]
Rows = list[dict[str, Any]]


class Ours(IterableDataset[Any]):
    """One epoch of the stream, in batches of samples."""

    def __init__(self, sealed: SealedShards, finish: Callable[[Any], Any]) -> None:
        self._sealed = sealed
        self._finish = finish

    def __iter__(self) -> Samples:
        shards = self._sealed.manifest.shards
        loader = Loader(
            self._sealed,
            shards,
            self._finish,
            global_batch=BATCH,
            replica=0,
            num_replicas=1,
            seed=1,
            window=WINDOW,
        )
        yield from loader.batches(0, loader.order.num_samples // BATCH * BATCH)


class Peer(IterableDataset[Any]):
    """One epoch of a peer, its samples as all readers give them."""

    def __init__(self, name: str, source: Any, finish: Callable[[str, Any], Any]) -> None:
        self._name = name
        self._source = source
        self._finish = finish

    def __iter__(self) -> Samples:
        for sample in self._source:
            yield self._finish(self._name, sample)


class PlainArrow(IterableDataset[Any]):
    """Plain pyarrow over the same files before they were sealed, shuffled within each file."""

    def __init__(self, paths: list[Path], finish: Callable[[Any], Any] | None) -> None:
        self._paths = paths
        self._finish = finish

    def __iter__(self) -> Samples:
        generator = np.random.Generator(np.random.PCG64(1))
        for path in generator.permutation(self._paths):  # type: ignore[arg-type]
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_file(file).read_all().combine_chunks()
            order = generator.permutation(table.num_rows)
            if self._finish is None:
                for start in range(0, len(order), 1024):
                    yield from table.take(order[start : start + 1024]).to_pylist()
            else:
                column = table.column("tokens").chunk(0)
                blocks = column.values.to_numpy().reshape(len(order), -1)
                for row in order:
                    yield self._finish(blocks[row])


def as_tensor(block: Any) -> torch.Tensor:
    return torch.from_numpy(block.astype(np.int64))


def as_batch(records: Any) -> Any:
    return torch.from_numpy(records.column("tokens").astype(np.int64))


def as_tensors(records: Any) -> Any:
    return as_batch(records).unbind()


def as_they_are(records: Any) -> Any:
    return records


def as_rows(records: Any) -> Any:
    return list(records)


def count_direct(make: Callable[[], Any], is_batched: bool) -> int:
    """Go through an epoch; the samples seen."""
    if is_batched:
        return sum(len(batch) for batch in make())
    return sum(1 for _ in make())


def count_loaded(make: Callable[[], Any], is_tokens: bool) -> int:
    """The same through a DataLoader with one worker, in batches of 32."""
    loader: DataLoader[Any] = DataLoader(
        make(), batch_size=BATCH, num_workers=1, collate_fn=None if is_tokens else as_rows
    )
    return sum(len(batch) for batch in loader)


def count_loaded_records(make: Callable[[], Any], finish: Callable[[Any], Any]) -> int:
    """The same for batches that are records, and are finished where they arrive."""
    loader: DataLoader[Any] = DataLoader(
        make(), batch_size=None, num_workers=1, collate_fn=as_they_are
    )
    return sum(len(finish(records)) for records in loader)


def measure(task: Callable[[], int], count: int) -> float:
    """Samples a second of a task in a fresh process, which must see every sample."""

    def run(connection: Any) -> None:
        torch.set_num_threads(1)
        pa.set_cpu_count(1)
        gc.collect()
        started = time.perf_counter()
        seen = task()
        connection.send((seen, time.perf_counter() - started))

    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=run, args=(there,))
    process.start()
    there.close()
    seen, seconds = here.recv()
    process.join()
    assert seen >= count // BATCH * BATCH, (seen, count)
    return float(seen / seconds)


def main() -> None:
    pa.array([0]).to_numpy()  # loads pandas, which is not to be in the time of plain pyarrow
    with tempfile.TemporaryDirectory() as name:
        rows = [
            *_compare(Path(name) / "tokens", "tokens", token_blocks(DATA_BYTES)),
            *_compare(Path(name) / "json", "JSON", text_records(DATA_BYTES)),
        ]
    publish("read", "samples/s", rows)


def _compare(directory: Path, kind: str, records: Rows) -> list[Row]:
    count, is_tokens = len(records), kind == "tokens"
    readers = _prepare(directory, records, is_tokens)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(REPETITIONS):
        for reader, (direct, loaded) in readers.items():
            rates[reader, "direct"].append(measure(direct, count))
            rates[reader, "DataLoader"].append(measure(loaded, count))
    middle = {case: median(values) for case, values in rates.items()}
    rows: list[Row] = []
    for how in ("direct", "DataLoader"):
        fastest = max(peers.PEERS, key=lambda reader: middle[reader, how])
        for reader in (*peers.PEERS, "pyarrow"):
            ratio = middle["ours", how] / middle[reader, how]
            wanted = TARGETS[kind, how] if reader == fastest else None
            if reader == "pyarrow" and how == "direct":
                wanted = PYARROW_TARGET
            rows.append(
                Row(
                    case=f"{kind}, {how}, {reader}",
                    ours=middle["ours", how],
                    reference=middle[reader, how],
                    ratio=ratio,
                    target=f"ratio >= {wanted}" if wanted else "",
                    holds=wanted is None or ratio >= wanted,
                )
            )
    return rows


def _prepare(
    directory: Path, records: Rows, is_tokens: bool
) -> dict[str, tuple[Callable[[], int], Callable[[], int]]]:
    """For each reader what goes through an epoch, directly and in a DataLoader."""
    manifest = write_plain(records, directory / "plain", records_per_shard=2048)
    sealed = place(manifest, directory / "plain", directory)
    paths = [directory / "plain" / shard.name for shard in manifest.shards]
    direct = partial(Ours, sealed, as_tensors if is_tokens else as_rows)
    loaded = partial(Ours, sealed, as_they_are)
    plain = partial(PlainArrow, paths, as_tensor if is_tokens else None)
    readers: dict[str, tuple[Callable[[], int], Callable[[], int]]] = {
        "ours": (
            partial(count_direct, direct, True),
            partial(count_loaded_records, loaded, as_batch if is_tokens else as_rows),
        ),
        "pyarrow": (partial(count_direct, plain, False), partial(count_loaded, plain, is_tokens)),
    }
    finish = peers.finish_tokens if is_tokens else peers.finish_document
    for name, (write, read) in peers.PEERS.items():
        write(records, directory / name, is_tokens=is_tokens)

        def build(name: str = name, read: peers.Read = read) -> Any:
            return Peer(name, read(directory / name, len(records), is_tokens=is_tokens), finish)

        readers[name] = (
            partial(count_direct, build, False),
            partial(count_loaded, build, is_tokens),
        )
    return readers


if __name__ == "__main__":
    main()
