"""Records in the global order, from shards that threads open ahead of their use."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from data.column_reader import ReadColumn, join_columns, join_values
from data.order import Indices, SampleOrder, Window
from data.record import Records
from data.shard import OpenShard
from storage.buffers import Memory

_THREADS = 4
"""Shards that are fetched and opened at once."""

_Part = tuple[Window, Indices]
"""Samples of one window, by where they stand among all samples of its shards."""


class SampleStream:
    """Gives the records at ascending positions of the order; close it when done.

    The shards of the present window are open. Those of the next one are opened while this one is
    used up, a step ahead of it, so that a store's latency is hidden; at the end of a window both
    are in memory, and never more than two windows. Nothing is opened for positions from `stop` on.
    """

    def __init__(
        self,
        order: SampleOrder,
        open_shard: Callable[[int, Memory], OpenShard],
        memory: Memory,
        stop: int | None = None,
    ) -> None:
        """memory: what the shards of two windows are to lie in."""
        self._order = order
        self._open_shard = open_shard
        self._memory = memory
        self._stop = stop
        self._opened: dict[int, Future[OpenShard]] = {}
        self._joined: dict[int, Mapping[str, ReadColumn]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shards")

    def records(self, positions: Indices) -> Records:
        """The records at these global positions, which must ascend.

        Raises what opening a shard of them raised, and gives no record then.
        """
        (records,) = self.blocks(positions, len(positions))
        return records

    def blocks(self, positions: Indices, size: int) -> Iterator[Records]:
        """The same, so many at a time: their order is quicker found for many at once."""
        found = list(self._order.places(positions))
        for start in range(0, len(positions), size):
            end = min(start + size, len(positions))
            parts = list(_cut(found, start, end))
            self._turn_to([window for window, _ in parts], int(positions[end - 1]))
            yield self._take(parts)

    def close(self) -> None:
        """End the threads and let go of the shards."""
        self._pool.shutdown(cancel_futures=True)
        self._joined.clear()
        self._opened.clear()

    def _take(self, parts: Sequence[_Part]) -> Records:
        taken = [
            {name: column.take(places) for name, column in self._join(window).items()}
            for window, places in parts
        ]
        if len(taken) == 1:
            return Records(taken[0])
        return Records({name: join_values([part[name] for part in taken]) for name in taken[0]})

    def _join(self, window: Window) -> Mapping[str, ReadColumn]:
        """The columns of all shards of the window, one after another."""
        joined = self._joined.get(window.start)
        if joined is None:
            opened = [self._opened[shard].result() for shard in window.shards.tolist()]
            sizes = [shard.num_records for shard in opened]
            joined = {
                name: join_columns(
                    [shard.columns[name] for shard in opened], sizes, self._memory.whole
                )
                for name in opened[0].columns
            }
            self._joined[window.start] = joined
        return joined

    def _turn_to(self, windows: Sequence[Window], last: int) -> None:
        """Have open these windows and a part of what comes next, and nothing else."""
        wanted = [shard for window in windows for shard in window.shards.tolist()]
        window = windows[-1]
        if self._stop is None or window.stop < self._stop:
            following = self._order.window_at(window.stop).shards
            used = (last + 1 - window.start) / window.num_samples
            wanted += following[: math.ceil(used * len(following)) + 1].tolist()
        for start in self._joined.keys() - {window.start for window in windows}:
            del self._joined[start]
        for shard in self._opened.keys() - set(wanted):
            self._opened.pop(shard).cancel()
        for shard in wanted:
            if shard not in self._opened:
                self._opened[shard] = self._pool.submit(self._open_shard, shard, self._memory)


def _cut(parts: Sequence[_Part], start: int, end: int) -> Iterator[_Part]:
    """What stands from start to end (exclusive) in these parts, one after another."""
    first = 0
    for window, places in parts:
        piece = places[max(0, start - first) : max(0, end - first)]
        if len(piece):
            yield window, piece
        first += len(places)
