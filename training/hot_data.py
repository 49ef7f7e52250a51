"""Batches for a replica whose part of the global batch changes as others come and go."""

from collections.abc import Generator, Sequence

from torch import Tensor

from data.order import bound_window
from data.sealed_shards import SealedShards
from data.shard import Shard
from data.stream import SampleStream
from training.config import TrainConfig
from training.loader import Loader, prefetch
from training.workload import Workload

Batch = tuple[Tensor, Tensor]


class HotLoader:
    """Gives this replica's part of any step. What comes next is prepared ahead; when the parts
    change, the open shards stay."""

    def __init__(
        self,
        config: TrainConfig,
        sealed: SealedShards,
        shards: Sequence[Shard],
        workload: Workload,
    ) -> None:
        self._config = config
        self._sealed = sealed
        self._shards = shards
        self._workload = workload
        self._window = bound_window(
            [shard.num_bytes for shard in shards],
            shards=config.window_shards,
            num_bytes=config.window_bytes,
        )
        whole = self._cut(0, 1)
        self.order = whole.order
        self._stream: SampleStream = whole.open_stream(config.steps * config.global_batch)
        self._batches: Generator[Batch, None, None] | None = None
        self._next: tuple[int, int, int] | None = None
        """Step, part and number of parts of the batch that comes next."""

    def read(self, step: int, part: int, num_parts: int) -> Batch:
        """One of so many parts of the step's global batch."""
        if self._next != (step, part, num_parts):
            self._turn(step, part, num_parts)
        assert self._batches
        self._next = (step + 1, part, num_parts)
        return next(self._batches)

    def close(self) -> None:
        """End the threads, and let go of the shards."""
        if self._batches:
            self._batches.close()
        self._stream.close()

    def _turn(self, step: int, part: int, num_parts: int) -> None:
        if self._batches:
            self._batches.close()
        size = self._config.global_batch
        loader = self._cut(part, num_parts)
        cursor, stop = (step - 1) * size, self._config.steps * size
        self._batches = prefetch(loader.batches(cursor, stop, self._stream))

    def _cut(self, part: int, num_parts: int) -> Loader:
        return Loader(
            self._sealed,
            self._shards,
            self._workload.collate,
            global_batch=self._config.global_batch,
            replica=part,
            num_replicas=num_parts,
            seed=self._config.seed,
            window=self._window,
        )
