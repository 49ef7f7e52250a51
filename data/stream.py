"""Records in the global order, from shards that threads open ahead of their use."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise

import numpy as np

from data.order import Indices, SampleOrder
from data.record import Column, Records
from data.shard import OpenShard

_THREADS = 4
"""Shards that are fetched and opened at once."""


class SampleStream:
    """Gives the records at ascending positions of the order; close it when done.

    The shards of the present window are open. Those of the next one are opened while this one is
    used up, in step with it, so that a store's latency is hidden; at the end of a window both are
    in memory, and never more than two windows. Nothing is opened for positions from `stop` on.
    """

    def __init__(
        self,
        order: SampleOrder,
        open_shard: Callable[[int], OpenShard],
        stop: int | None = None,
    ) -> None:
        self._order = order
        self._open_shard = open_shard
        self._stop = stop
        self._opened: dict[int, Future[OpenShard]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shards")

    def records(self, positions: Indices) -> Records:
        """The records at these global positions, which must ascend.

        Raises what opening a shard of them raised, and gives no record then.
        """
        (records,) = self.blocks(positions, len(positions))
        return records

    def blocks(self, positions: Indices, size: int) -> Iterator[Records]:
        """The same, so many at a time: their order is quicker found for many at once."""
        samples = self._order.samples(positions)
        for start in range(0, len(positions), size):
            part = slice(start, start + size)
            self._turn_to(int(positions[part][0]), int(positions[part][-1]))
            yield self._take(samples.shards[part], samples.rows[part])

    def _take(self, shards: Indices, rows: Indices) -> Records:
        by_shard = np.argsort(shards, kind="stable")
        shards, rows = shards[by_shard], rows[by_shard]
        firsts = np.flatnonzero(np.diff(shards, prepend=-1)).tolist()
        groups = [
            (self._opened[int(shards[first])].result().columns, rows[first:end])
            for first, end in pairwise((*firsts, len(shards)))
        ]
        places = np.empty_like(by_shard)
        places[by_shard] = np.arange(len(by_shard))
        return Records(
            {
                name: _join([columns[name](part) for columns, part in groups])
                for name in groups[0][0]
            },
            places,
        )

    def close(self) -> None:
        """End the threads and let go of the shards."""
        self._pool.shutdown(cancel_futures=True)
        self._opened.clear()

    def _turn_to(self, first: int, last: int) -> None:
        """Have open what holds these positions and a part of what comes next, and nothing else."""
        window = self._order.window_at(first)
        wanted = window.shards.tolist()
        while window.stop <= last:
            window = self._order.window_at(window.stop)
            wanted += window.shards.tolist()
        if self._stop is None or window.stop < self._stop:
            following = self._order.window_at(window.stop).shards
            used = (last + 1 - window.start) / window.num_samples
            wanted += following[: math.ceil(used * len(following))].tolist()
        for shard in self._opened.keys() - set(wanted):
            self._opened.pop(shard).cancel()
        for shard in wanted:
            if shard not in self._opened:
                self._opened[shard] = self._pool.submit(self._open_shard, shard)


def _join(parts: Sequence[Column]) -> Column:
    """The values of one column, part after part."""
    blocks = [part for part in parts if isinstance(part, np.ndarray)]
    if len(blocks) == len(parts) and len({block.shape[1:] for block in blocks}) == 1:
        return np.concatenate(blocks)
    return list(chain.from_iterable(parts))
