"""The global order of samples: a pure function of (manifest, seed, epoch)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Indices = np.ndarray[Any, np.dtype[np.int64]]
_Words = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 6


class SampleSlice(NamedTuple):
    """Samples of the order: for each its shard and its row in that shard."""

    shards: Indices
    rows: Indices


@dataclass(frozen=True)
class Window:
    """Consecutive shards of one epoch's order, whose samples are shuffled among each other."""

    epoch: int
    number: int
    """Counted from the epoch's first window."""
    start: int
    """Global position of its first sample."""
    shards: Indices
    ends: Indices
    """Samples of the window up to the end of each of its shards."""
    keys: _Words

    @property
    def num_samples(self) -> int:
        return int(self.ends[-1])

    @property
    def stop(self) -> int:
        """Global position after its last sample."""
        return self.start + self.num_samples


class SampleOrder:
    """Every sample exactly once an epoch, epoch after epoch, as one endless sequence.

    In each epoch the shards are permuted, then the samples are shuffled inside windows of
    `window` consecutive shards, so that reads stay local. The number of workers plays no part:
    global batch k is positions [k * batch, (k + 1) * batch), a rank takes its part of them, and
    the cursor of a run is one integer. A batch may span two epochs; nothing is dropped.

    A sample is found from its position alone, by a permutation that is computed and not stored. So
    a position costs the same wherever it stands and however large shards and dataset are. What is
    held is proportional to the number of shards.
    """

    def __init__(self, shard_sizes: Sequence[int], *, seed: int, window: int) -> None:
        assert window >= 1
        self._sizes: Indices = np.asarray(shard_sizes, dtype=np.int64)
        self._seed = seed
        self._window = window
        self.num_samples = int(self._sizes.sum())
        assert self.num_samples > 0
        self._epoch_shards = lru_cache(maxsize=2)(self._permute_shards)
        self._recent_window = lru_cache(maxsize=4)(self._find_window)

    def slice(self, start: int, stop: int) -> SampleSlice:
        """The samples at global positions [start, stop)."""
        return self.samples(np.arange(start, stop))

    def samples(self, positions: Indices) -> SampleSlice:
        """The samples at these global positions, which must ascend."""
        shards, rows = np.empty_like(positions), np.empty_like(positions)
        done = 0
        for window, places in self.places(positions):
            end = done + len(places)
            member = np.searchsorted(window.ends, places, side="right")
            shards[done:end] = window.shards[member]
            sizes = self._sizes[window.shards[member]]
            rows[done:end] = places - (window.ends[member] - sizes)
            done = end
        return SampleSlice(shards, rows)

    def places(self, positions: Indices) -> Iterator[tuple[Window, Indices]]:
        """The same, window by window: where among all samples of the window's shards, one after
        another, those of these positions stand."""
        done = 0
        while done < len(positions):
            window = self.window_at(int(positions[done]))
            end = done + int(np.searchsorted(positions[done:], window.stop))
            yield (
                window,
                permute(positions[done:end] - window.start, window.num_samples, window.keys),
            )
            done = end

    def window_at(self, position: int) -> Window:
        """The window that holds a global position."""
        epoch, offset = divmod(position, self.num_samples)
        _, ends = self._epoch_shards(epoch)
        return self._recent_window(epoch, int(np.searchsorted(ends, offset, side="right")))

    def _permute_shards(self, epoch: int) -> tuple[Indices, Indices]:
        """The epoch's shards in order, and the position at which each window of them ends."""
        count = len(self._sizes)
        permuted = permute(np.arange(count), count, _keys(self._seed, epoch, 0))
        ends = np.cumsum(self._sizes[permuted])
        last_of_window = np.arange(self._window - 1, count + self._window - 1, self._window)
        return permuted, ends[np.minimum(last_of_window, count - 1)]

    def _find_window(self, epoch: int, number: int) -> Window:
        permuted, ends = self._epoch_shards(epoch)
        shards = permuted[number * self._window : (number + 1) * self._window]
        return Window(
            epoch=epoch,
            number=number,
            start=epoch * self.num_samples + (int(ends[number - 1]) if number else 0),
            shards=shards,
            ends=np.cumsum(self._sizes[shards]),
            keys=_keys(self._seed, epoch, 1 + number),
        )


def bound_window(shard_bytes: Sequence[int], *, shards: int, num_bytes: int) -> int:
    """How many shards a window has: at most `shards`, and no more than of the largest ones have
    `num_bytes` together; at least one."""
    return max(1, min(shards, num_bytes // max(shard_bytes)))


def permute(values: Indices, size: int, keys: _Words) -> Indices:
    """Where the permutation of range(size) that the keys choose sends these values.

    A generalised Feistel network over the smallest rectangle that holds `size`, walked until it
    ends inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). It shuffles; it
    hides nothing.
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    # Unsigned all through: NumPy divides such numbers much faster.
    across, down = np.divmod(values.astype(np.uint64), np.uint64(height))
    for key_across, key_down in keys.reshape(-1, 2):
        across = np.remainder(across + _scramble(down, key_across), np.uint64(width))
        down = np.remainder(down + _scramble(across, key_down), np.uint64(height))
    permuted: Indices = (across * np.uint64(height) + down).astype(np.int64)
    outside = permuted >= size
    if outside.any():
        permuted[outside] = permute(permuted[outside], size, keys)
    return permuted


def _scramble(values: _Words, key: np.uint64) -> _Words:
    """32 bits of SplitMix64's output function (Steele, Lea, Flood, 2014)."""
    mixed = values + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= np.uint64(32)
    return mixed


def _keys(seed: int, epoch: int, stream: int) -> _Words:
    # NumPy keeps SeedSequence stable across releases (NEP 19).
    sequence = np.random.SeedSequence((seed, epoch, stream))
    return sequence.generate_state(_ROUNDS, np.uint64).astype(np.uint64)
