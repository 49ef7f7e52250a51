"""The global order: every sample once an epoch, whatever the number of workers."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.order import SampleOrder, bound_window, permute

SIZES = [7, 1, 12, 5, 3, 9, 4, 8]


def ids(order: SampleOrder, start: int, stop: int) -> list[tuple[int, int]]:
    part = order.slice(start, stop)
    return list(zip(part.shards.tolist(), part.rows.tolist(), strict=True))


def everything(sizes: list[int]) -> Counter[tuple[int, int]]:
    return Counter((shard, row) for shard, size in enumerate(sizes) for row in range(size))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
    window=st.integers(1, 15),
    epoch=st.integers(0, 3),
)
def test_every_sample_exactly_once_an_epoch(
    sizes: list[int], seed: int, window: int, epoch: int
) -> None:
    order = SampleOrder(sizes, seed=seed, window=window)
    n = order.num_samples
    assert Counter(ids(order, epoch * n, (epoch + 1) * n)) == everything(sizes)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
def test_the_workers_parts_make_the_same_global_batch(workers: int) -> None:
    order = SampleOrder(SIZES, seed=3, window=3)
    batch = 24
    for step in range(10):
        whole = ids(order, step * batch, (step + 1) * batch)
        size = batch // workers
        parts = [
            ids(order, step * batch + rank * size, step * batch + (rank + 1) * size)
            for rank in range(workers)
        ]
        assert [sample for part in parts for sample in part] == whole


def test_a_slice_is_the_same_from_any_cursor() -> None:
    order = SampleOrder(SIZES, seed=5, window=2)
    whole = ids(order, 0, 200)
    for cursor in (1, 13, 48, 49, 50, 97, 150):
        assert ids(SampleOrder(SIZES, seed=5, window=2), cursor, 200) == whole[cursor:]


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(SIZES, seed=5, window=3)
    n = order.num_samples
    first, second = ids(order, 0, n), ids(order, n, 2 * n)
    other = ids(SampleOrder(SIZES, seed=6, window=3), 0, n)
    assert first != second
    assert first != other
    assert first != sorted(first)


def test_reads_stay_in_the_window() -> None:
    order = SampleOrder([10] * 20, seed=1, window=4)
    part = order.slice(0, 200)
    for start in range(0, 200, 40):
        assert len(np.unique(part.shards[start : start + 40])) == 4


def test_the_order_of_this_release_is_pinned() -> None:
    """A resumed run must meet the order it left: this may change only with the format."""
    order = SampleOrder([3, 4, 2], seed=0, window=2)
    assert ids(order, 0, 9) == [
        *((1, 2), (1, 0), (2, 1), (2, 0), (1, 1), (1, 3)),
        *((0, 2), (0, 1), (0, 0)),
    ]


@settings(deadline=None, max_examples=80)
@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_reaches_every_value_once(size: int, key: int) -> None:
    keys = np.arange(6, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    assert sorted(permute(np.arange(size), size, keys).tolist()) == list(range(size))


def test_every_place_is_as_likely_for_every_sample() -> None:
    """Over many seeds: each of 10 samples stands in each of 10 places 100 times, give or take."""
    counts = np.zeros((10, 10))
    for seed in range(1000):
        counts[np.arange(10), SampleOrder([10], seed=seed, window=1).slice(0, 10).rows] += 1
    squares = ((counts - 100) ** 2 / 100).sum()
    # Chi-square with 81 degrees of freedom: 1 in 10,000 is above 135.
    assert squares < 135


def test_a_large_dataset_needs_no_large_array() -> None:
    """10 billion samples in windows of 51 million: a batch anywhere touches its own samples."""
    order = SampleOrder([100_000] * 100_000, seed=1, window=512)
    for start in (0, 5_000_000_000, order.num_samples - 1000):
        tracemalloc.start()
        part = order.slice(start, start + 1000)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 << 20
        assert len(set(zip(part.shards.tolist(), part.rows.tolist(), strict=True))) == 1000
        assert len(np.unique(part.shards)) > 150


@pytest.mark.parametrize(("workers", "then"), [(1, 3), (2, 8), (4, 3), (8, 1)])
def test_the_number_of_workers_may_change_in_mid_epoch(workers: int, then: int) -> None:
    """Parts of a batch that does not divide are uneven, and still every sample comes once."""
    order = SampleOrder(SIZES, seed=2, window=3)  # 49 samples
    seen: list[tuple[int, int]] = []
    batch, cursor = 10, 0
    while cursor < 2 * order.num_samples:
        count = workers if cursor < 30 else then
        for rank in range(count):
            seen += ids(
                order,
                cursor + batch * rank // count,
                cursor + batch * (rank + 1) // count,
            )
        cursor += batch
    assert Counter(seen[:49]) == Counter(seen[49:98]) == everything(SIZES)
    assert seen == ids(order, 0, cursor)


@pytest.mark.parametrize(
    ("shards", "num_bytes", "expected"),
    [(64, 1000, 10), (64, 10_000, 64), (64, 99, 1), (3, 1000, 3), (64, 1099, 10)],
)
def test_a_window_is_bounded_by_its_largest_shards_bytes(
    shards: int, num_bytes: int, expected: int
) -> None:
    assert bound_window([100, 7, 50], shards=shards, num_bytes=num_bytes) == expected
