"""Batches for one rank: its part of the global sample order, from shards opened in memory."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from data.order import SampleOrder
from data.sealed_shards import SealedShards
from data.shard import OpenShard, Shard

if TYPE_CHECKING:
    from torch import Tensor

    Batch = tuple[Tensor, Tensor]

Collate = Callable[[Sequence[dict[str, Any]]], "Batch"]


class Loader:
    """Streams a rank's batches. Its state is the cursor: the first global position not yet used."""

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
    ) -> None:
        assert global_batch % num_replicas == 0
        self.order = SampleOrder([s.num_records for s in shards], seed=seed, window=window)
        self._collate = collate
        self._global_batch = global_batch
        self._size = global_batch // num_replicas
        self._offset = replica * self._size
        # An epoch's last window and the next one's first are both in use at the seam.
        self._open = lru_cache(maxsize=2 * window)(lambda index: sealed.open(shards[index]))

    def batches(self, cursor: int) -> Iterator["Batch"]:
        """Endless batches of this rank, the first one from global position `cursor`."""
        while True:
            start = cursor + self._offset
            shards, rows = self.order.slice(start, start + self._size)
            records: list[dict[str, Any]] = [{}] * self._size
            for index in np.unique(shards):
                members = np.flatnonzero(shards == index)
                opened: OpenShard = self._open(int(index))
                for position, record in zip(members, opened.rows(rows[members]), strict=True):
                    records[position] = record
            yield self._collate(records)
            cursor += self._global_batch


def prefetch(batches: Iterator["Batch"], depth: int = 4) -> Generator["Batch", None, None]:
    """The same batches, prepared by a thread up to `depth` ahead. Its errors are raised here.

    Close it: the thread ends with it.
    """
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stopped = threading.Event()

    def offer(item: "Batch | BaseException") -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for batch in batches:
                offer(batch)
                if stopped.is_set():
                    return
        except BaseException as error:  # handed to the consumer, who raises it
            offer(error)

    thread = threading.Thread(target=fill, name="loader", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
