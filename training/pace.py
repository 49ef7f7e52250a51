"""In what order a worker makes its steps: in turn with all others, or as it claims them."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing

from torch import Tensor

from data.order import bound_window
from data.sealed_shards import SealedShards
from data.shard import Shard
from training.asynchronous import Asynchronous
from training.config import TrainConfig
from training.loader import Loader, prefetch
from training.parallel import ParallelModel
from training.synchronization import Synchronizer
from training.timing import StepTimer
from training.workload import Workload

Steps = Generator[tuple[int, Iterable[tuple[Tensor, Tensor]]], None, None]
"""The number of each step, from 1, with this worker's batches for it."""
Meet = Callable[[int, int], bool]
"""Called with the first and the last of steps that all workers have behind them; whether to go on,
which all are told alike."""


def open_loader(
    config: TrainConfig,
    sealed: SealedShards,
    shards: Sequence[Shard],
    workload: Workload,
    model: ParallelModel,
) -> Loader:
    """What streams this worker's batches: its part of each global batch, or whole ones."""
    is_whole = config.synchronize.mode == "asynchronous"
    return Loader(
        sealed,
        shards,
        workload.collate,
        global_batch=config.global_batch,
        replica=0 if is_whole else model.replica,
        num_replicas=1 if is_whole else config.dims.num_replicas,
        seed=config.seed,
        window=bound_window(
            [shard.num_bytes for shard in shards],
            shards=config.window_shards,
            num_bytes=config.window_bytes,
        ),
        parts=model.batches_per_step,
    )


def pace(
    config: TrainConfig,
    loader: Loader,
    model: ParallelModel,
    synchronizer: Synchronizer,
    done: int,
    timer: StepTimer,
    meet: Meet,
) -> Steps:
    """The steps after `done` that this worker is to make. Close it: threads end with it."""
    if isinstance(synchronizer, Asynchronous):
        return _as_claimed(config, loader, synchronizer, done, timer, meet)
    return _in_turn(config, loader, model.batches_per_step, done, timer, meet)


def _in_turn(
    config: TrainConfig,
    loader: Loader,
    batches_per_step: int,
    done: int,
    timer: StepTimer,
    meet: Meet,
) -> Steps:
    start, stop = done * config.global_batch, config.steps * config.global_batch
    with closing(prefetch(loader.batches(start, stop))) as batches:
        for step in range(done + 1, config.steps + 1):
            with timer.phase("data_wait"):
                parts = [next(batches) for _ in range(batches_per_step)]
            yield step, parts
            if not meet(step, step):
                return


def _as_claimed(
    config: TrainConfig,
    loader: Loader,
    synchronizer: Asynchronous,
    done: int,
    timer: StepTimer,
    meet: Meet,
) -> Steps:
    with loader.reading(config.steps) as read:
        while done < config.steps:
            claims = synchronizer.claims(done, config.steps)
            while True:
                with timer.phase("communication"):
                    number = next(claims, None)
                if number is None:
                    break
                with timer.phase("data_wait"):
                    batch = read(number)
                yield number + 1, [batch]
            first, done = done + 1, synchronizer.meeting(done, config.steps)
            if not meet(first, done):
                return
