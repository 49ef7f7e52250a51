"""The loader: each sample once, the ranks' parts, any cursor, and errors that reach the loop."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import pytest

from data.column_reader import Blocks, Numbers
from data.errors import ShardBroken
from data.order import SampleOrder
from data.record import Records
from data.sealed_shards import SealedShards
from data.shard import OpenShard, Shard
from data.stream import SampleStream
from storage.buffers import Memory
from training.loader import Loader, prefetch

SIZES = (40, 7, 23, 30)


def open_numbers(first: int, count: int) -> OpenShard:
    """An opened shard whose rows say their global number."""
    return OpenShard(count, {"number": Numbers(first + np.arange(count))})


class Sealed:
    """Stands for a region's shards; counts how often one is opened."""

    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, shard: Shard, memory: Memory) -> OpenShard:
        self.opened.append(shard.name)
        return open_numbers(sum(SIZES[: int(shard.name)]), shard.num_records)


def make_loader(sealed: Any, replica: int = 0, num_replicas: int = 1, batch: int = 12) -> Loader:
    shards = [
        Shard(
            name=str(index),
            digest="0" * 64,
            split="train",
            jurisdiction="EU",
            num_records=size,
            num_bytes=1,
        )
        for index, size in enumerate(SIZES)
    ]

    def collate(records: Records) -> Any:
        return [record["number"] for record in records], None

    return Loader(
        cast(SealedShards, sealed),
        shards,
        collate,
        global_batch=batch,
        replica=replica,
        num_replicas=num_replicas,
        seed=3,
        window=2,
    )


def take(loader: Loader, count: int, cursor: int = 0) -> list[list[int]]:
    batches = cast(Iterator[tuple[list[int], None]], loader.batches(cursor))
    return [next(batches)[0] for _ in range(count)]


def test_every_sample_is_seen_once_an_epoch() -> None:
    numbers = list(chain.from_iterable(take(make_loader(Sealed(), batch=10), 20)))
    assert sorted(numbers[:100]) == list(range(100))
    assert sorted(numbers[100:]) == list(range(100))
    assert numbers[:100] != numbers[100:]


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 5, 8])
def test_the_ranks_parts_make_the_global_batch(num_replicas: int) -> None:
    """Where 12 does not divide by the ranks, some have one sample more."""
    whole = take(make_loader(Sealed()), 25)
    parts = [take(make_loader(Sealed(), rank, num_replicas), 25) for rank in range(num_replicas)]
    for step, batch in enumerate(whole):
        assert list(chain.from_iterable(part[step] for part in parts)) == batch


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 3), (3, 4), (4, 2), (2, 1)])
def test_ranks_that_change_in_mid_epoch_repeat_and_miss_nothing(before: int, after: int) -> None:
    def ranks(count: int, batches: int, cursor: int) -> list[int]:
        parts = [take(make_loader(Sealed(), r, count), batches, cursor) for r in range(count)]
        return [number for step in zip(*parts, strict=True) for part in step for number in part]

    seen = ranks(before, 5, 0) + ranks(after, 12, 60)  # 100 samples an epoch, 12 a batch
    assert sorted(seen[:100]) == sorted(seen[100:200]) == list(range(100))
    assert seen == list(chain.from_iterable(take(make_loader(Sealed()), 17)))


def test_a_cursor_goes_on_where_it_stood() -> None:
    whole = take(make_loader(Sealed()), 30)
    for done in (1, 8, 9, 17):
        assert take(make_loader(Sealed()), 30 - done, cursor=12 * done) == whole[done:]


def test_a_shard_is_opened_once_for_a_window() -> None:
    sealed = Sealed()
    take(make_loader(sealed, batch=10), 10)  # one epoch
    assert sorted(sealed.opened[:4]) == ["0", "1", "2", "3"]


def test_the_next_windows_shards_are_opened_ahead_and_no_more() -> None:
    """Sixteen shards in windows of four: with the first quarter of a window two of the next one are
    opened, with each further quarter one, and never more than two windows are in memory."""
    opened = threading.Semaphore(0)
    living: list[weakref.ref[OpenShard]] = []

    def open_shard(index: int, memory: Memory) -> OpenShard:
        shard = open_numbers(10 * index, 10)
        living.append(weakref.ref(shard))
        opened.release()
        return shard

    order = SampleOrder([10] * 16, seed=1, window=4)
    with closing(SampleStream(order, open_shard, Memory(1, 8), stop=160)) as stream:
        counts = (6, 1, 1, 0, 2, 1, 1, 0, 2, 1, 1, 0, 0, 0, 0, 0)
        for start, count in zip(range(0, 160, 10), counts, strict=True):
            stream.records(np.arange(start, start + 10))
            for _ in range(count):
                assert opened.acquire(timeout=60)
            assert not opened.acquire(blocking=False)
            assert sum(shard() is not None for shard in living) <= 8
    assert not [t for t in threading.enumerate() if t.name.startswith("shards")]


def test_an_error_of_the_thread_is_raised_in_the_loop() -> None:
    class Broken(Sealed):
        def open(self, shard: Shard, memory: Memory) -> OpenShard:
            if len(self.opened) == 2:
                raise ShardBroken(f"shard {shard.name}")
            return super().open(shard, memory)

    batches = prefetch(make_loader(Broken(), batch=10).batches(0))
    with pytest.raises(ShardBroken, match=r"shard \d"):
        list(islice(batches, 10))
    assert not [t for t in threading.enumerate() if t.name == "loader"]


def test_batches_come_in_order_and_the_thread_ends_with_the_loop() -> None:
    expected = take(make_loader(Sealed()), 20)
    batches = cast(Any, prefetch(make_loader(Sealed()).batches(0)))
    assert [next(batches)[0] for _ in range(20)] == expected
    assert [t for t in threading.enumerate() if t.name == "loader"]
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "loader"]


def test_batches_end_where_they_should_and_nothing_beyond_is_opened() -> None:
    sealed = Sealed()
    batches = cast(Any, prefetch(make_loader(sealed, batch=10).batches(0, 100)))
    assert sorted(number for numbers, _ in batches for number in numbers) == list(range(100))
    assert sorted(sealed.opened) == ["0", "1", "2", "3"]
    assert not [t for t in threading.enumerate() if t.name.startswith(("loader", "shards"))]


def test_rows_stand_where_the_order_says() -> None:
    loader = make_loader(Sealed())
    shards, rows = loader.order.slice(0, 12)
    starts = np.cumsum((0, *SIZES))[shards]
    assert take(loader, 1) == [list(starts + rows)]


@pytest.mark.parametrize("length", [lambda first: 3, lambda first: 3 + first])
def test_a_column_of_arrays_is_one_array_where_all_have_one_shape(length: Any) -> None:
    """From shards of blocks, and from shards whose blocks differ, which give lists."""

    class SealedBlocks(Sealed):
        def open(self, shard: Shard, memory: Memory) -> OpenShard:
            numbers = super().open(shard, memory).columns["number"].values  # type: ignore[attr-defined]
            blocks = np.repeat(numbers[:, None], length(numbers[0]), axis=1)
            return OpenShard(len(numbers), {"number": Numbers(numbers), "block": Blocks(blocks)})

    records: list[Records] = []
    loader = make_loader(SealedBlocks(), batch=10)
    loader._collate = lambda batch: records.append(batch) or (None, None)  # type: ignore[func-returns-value, assignment, return-value]
    list(islice(loader.batches(0), 10))
    kinds = {type(batch.column("block")) for batch in records}
    assert (kinds == {np.ndarray}) == (length(0) == length(40))
    for row in chain.from_iterable(records):
        assert set(row["block"].tolist()) == {row["number"]}
    assert sorted(row["number"] for row in chain.from_iterable(records)) == list(range(100))
