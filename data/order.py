"""The global order of samples: a pure function of (manifest, seed, epoch)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]


class SampleSlice(NamedTuple):
    """Consecutive samples of the order: for each its shard and its row in that shard."""

    shards: Indices
    rows: Indices


class SampleOrder:
    """Every sample exactly once an epoch, epoch after epoch, as one endless sequence.

    In each epoch the shards are permuted, then the samples are shuffled inside windows of
    `window` consecutive shards, so that reads stay local. The number of workers plays no part:
    global batch k is positions [k * batch, (k + 1) * batch), a rank takes its part of them, and
    the cursor of a run is one integer. A batch may span two epochs; nothing is dropped.

    Permutations sort the raw output of Philox, whose stream NumPy keeps stable across releases
    (NEP 19), where `Generator.permutation` may change.
    """

    def __init__(self, shard_sizes: Sequence[int], *, seed: int, window: int) -> None:
        assert window >= 1
        self._sizes: Indices = np.asarray(shard_sizes, dtype=np.int64)
        self._seed = seed
        self._window = window
        self.num_samples = int(self._sizes.sum())
        assert self.num_samples > 0
        self._epoch_shards = lru_cache(maxsize=2)(self._permute_shards)
        self._window_order = lru_cache(maxsize=4)(self._shuffle_window)

    def slice(self, start: int, stop: int) -> SampleSlice:
        """The samples at global positions [start, stop)."""
        shards: list[Indices] = []
        rows: list[Indices] = []
        while start < stop:
            epoch, position = divmod(start, self.num_samples)
            _, ends = self._epoch_shards(epoch)
            window = int(np.searchsorted(ends, position, side="right"))
            window_start = int(ends[window - 1]) if window else 0
            order = self._window_order(epoch, window)
            begin = position - window_start
            taken = min(stop - start, len(order.rows) - begin)
            shards.append(order.shards[begin : begin + taken])
            rows.append(order.rows[begin : begin + taken])
            start += taken
        return SampleSlice(np.concatenate(shards), np.concatenate(rows))

    def _permute_shards(self, epoch: int) -> tuple[Indices, Indices]:
        """The epoch's shards in order, and the position at which each window of them ends."""
        permuted = _permutation(len(self._sizes), self._seed, epoch, 0)
        ends = np.cumsum(self._sizes[permuted])
        last_of_window = np.arange(self._window - 1, len(permuted) + self._window - 1, self._window)
        return permuted, ends[np.minimum(last_of_window, len(permuted) - 1)]

    def _shuffle_window(self, epoch: int, window: int) -> SampleSlice:
        permuted, _ = self._epoch_shards(epoch)
        members = permuted[window * self._window : (window + 1) * self._window]
        shards = np.repeat(members, self._sizes[members])
        rows = np.concatenate([np.arange(self._sizes[shard]) for shard in members])
        shuffled = _permutation(len(rows), self._seed, epoch, 1 + window)
        return SampleSlice(shards[shuffled], rows[shuffled])


def _permutation(length: int, seed: int, epoch: int, stream: int) -> Indices:
    key = np.random.SeedSequence((seed, epoch, stream)).generate_state(2, np.uint64)
    draws = np.random.Philox(key=key).random_raw(length)
    return np.argsort(draws, kind="stable").astype(np.int64)
