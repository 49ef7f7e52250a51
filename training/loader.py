"""Batches for one rank: its part of the global sample order, from shards opened in memory."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING

import numpy as np

from data.order import SampleOrder
from data.record import Records
from data.sealed_shards import SealedShards
from data.shard import Shard
from data.stream import SampleStream
from storage.buffers import Memory

if TYPE_CHECKING:
    from torch import Tensor

    Batch = tuple[Tensor, Tensor]
    Batches = Generator[Batch, None, None]

Collate = Callable[[Records], "Batch"]

# Records are taken out of the shards for many batches at once: for few it would cost more to go
# through the shards of a window than to take the records.
_BLOCK_SAMPLES = 1024
_BLOCK_BYTES = 1 << 20
_BLOCKS_AT_ONCE = 4


class Loader:
    """Streams a rank's batches. Its state is the cursor: the first global position not yet used.

    Where a global batch does not divide by the replicas, some ranks' parts are one sample larger.
    """

    def __init__(
        self,
        sealed: SealedShards,
        shards: Sequence[Shard],
        collate: Collate,
        *,
        global_batch: int,
        replica: int,
        num_replicas: int,
        seed: int,
        window: int,
        parts: int = 1,
    ) -> None:
        """parts: of a replica's batch, equal ones, each collated by itself and given as a batch."""
        assert num_replicas <= global_batch
        self.order = SampleOrder([s.num_records for s in shards], seed=seed, window=window)
        self._open = lambda index, memory: sealed.open(shards[index], memory)
        self._largest_bytes = max(shard.num_bytes for shard in shards)
        self._shards_at_once = min(2 * window, len(shards))
        self._collate = collate
        self._global_batch = global_batch
        self._offset = global_batch * replica // num_replicas
        self._size = global_batch * (replica + 1) // num_replicas - self._offset
        assert self._size % parts == 0
        self._parts = parts
        self._batches_at_once = self._count_batches(shards, min(1.0, window / len(shards)))

    def _count_batches(self, shards: Sequence[Shard], share: float) -> int:
        """How many batches are taken at once: not over more than two windows, of which each has
        this share of the samples."""
        record_bytes = max(1, sum(s.num_bytes for s in shards) // self.order.num_samples)
        samples = min(_BLOCK_SAMPLES, _BLOCK_BYTES // record_bytes)
        in_window = int(self.order.num_samples * share) // self._global_batch
        return max(1, min(samples // self._size, in_window))

    def open_stream(self, stop: int | None = None) -> SampleStream:
        """What `batches` reads from. Close it: threads end with it."""
        memory = Memory(self._largest_bytes, self._shards_at_once)
        return SampleStream(self.order, self._open, memory, stop)

    def batches(
        self, cursor: int, stop: int | None = None, stream: SampleStream | None = None
    ) -> "Batches":
        """Batches of this rank from global position `cursor` to `stop`, whole batches apart, or
        endless.

        stream: what to read from, which stays open; without it, one of its own. Close it: threads
        end with it.
        """
        assert stop is None or (stop - cursor) % self._global_batch == 0
        size, part = self._size, self._size // self._parts
        with nullcontext(stream) if stream else closing(self.open_stream(stop)) as opened:
            while stop is None or cursor < stop:
                end = cursor + self._global_batch * self._batches_at_once * _BLOCKS_AT_ONCE
                end = end if stop is None else min(end, stop)
                starts = np.arange(cursor, end, self._global_batch) + self._offset
                positions = (starts[:, None] + np.arange(size)).reshape(-1)
                for records in opened.blocks(positions, self._batches_at_once * size):
                    for first in range(0, len(records), part):
                        yield self._collate(records[first : first + part])
                cursor = end

    @contextmanager
    def reading(self, num_batches: int) -> "Iterator[Callable[[int], Batch]]":
        """A function that gives this rank's part of the global batch of a number, below
        `num_batches`. The numbers it is called with must ascend."""
        with closing(self.open_stream(num_batches * self._global_batch)) as stream:

            def read(number: int) -> "Batch":
                first = number * self._global_batch + self._offset
                return self._collate(stream.records(np.arange(first, first + self._size)))

            yield read


def prefetch(batches: "Batches", depth: int = 16) -> "Batches":
    """The same batches, prepared by a thread up to `depth` ahead. Its errors are raised here.

    Close it: the thread ends with it, and `batches` is closed.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(item: "Batch | BaseException | None") -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def fill() -> None:
        try:
            with closing(batches):
                for batch in batches:
                    offer(batch)
                    if stopped.is_set():
                        return
            offer(None)
        except BaseException as error:  # handed to the consumer, who raises it
            offer(error)

    thread = threading.Thread(target=fill, name="loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
