"""Samples a second: what the loader gives against what the training of place names takes.

The loader reads sealed shards from a store of files, opens them, and collates batches; the step
trains on batches in memory, in one process with one thread. Both alternate. A last row has both at
once: the share of a training's time that its loop waits for data.
"""

import tempfile
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.sealed_data import place, write_plain
from benchmarks.step import OPTIMIZER, ROOT, build_model
from benchmarks.table import Row, publish
from data.sealed_shards import SealedShards
from data.shard import Shard
from examples.place_names import ingest, records
from training.config import ParallelDims, TrainConfig
from training.loader import Loader, prefetch
from training.optimization import Gradients, build_optimizers, take_step
from training.parallel import build_mesh, parallelize
from training.timing import StepTimer
from training.workload import Workload, load_workload

BATCH = 16
"""Samples of a worker, as params.yaml has them for two."""
NUM_BATCHES = 2000
NUM_STEPS = 100
REPETITIONS = 5
LEAST_RATIO = 10.0
MOST_WAITING = 0.01


def load(sealed: SealedShards, shards: tuple[Shard, ...], workload: Workload) -> Loader:
    return Loader(
        sealed,
        shards,
        workload.collate,
        global_batch=BATCH,
        replica=0,
        num_replicas=1,
        seed=0,
        window=64,
    )


class Training:
    """The step of place names, by one rank."""

    def __init__(self, workload: Workload) -> None:
        self._config = TrainConfig(
            region="eu",
            dims=ParallelDims(dp_replicate=1),
            steps=NUM_STEPS,
            global_batch=BATCH,
            optimizer=OPTIMIZER,
        )
        mesh = build_mesh(self._config.dims, torch.device("cpu"))
        self._model = parallelize(workload, build_model(workload), self._config, mesh)
        self._optimizers = build_optimizers(self._model.parts, OPTIMIZER)
        self._gradients = Gradients(self._model.parts)
        self.timer = StepTimer()

    def run(self, batches: Iterator[tuple[Tensor, Tensor]], num_steps: int) -> dict[str, float]:
        """Take steps; their seconds by phase."""
        self.timer.take()
        for _ in range(num_steps):
            with self.timer.phase("data_wait"):
                inputs, target = next(batches)
            self._model.forward_backward(inputs, target, self.timer)
            with self.timer.phase("optimizer"):
                self._gradients.clip(OPTIMIZER.grad_clip)
                take_step(self._optimizers, OPTIMIZER.lr)
                self._gradients.forget()
        return self.timer.take()


def measure_loader(loader: Loader) -> float:
    """Samples a second of a fresh start, the first window included."""
    started = perf_counter()
    with closing(loader.batches(0, NUM_BATCHES * BATCH)) as batches:
        for _ in batches:
            pass
    return NUM_BATCHES * BATCH / (perf_counter() - started)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        meeting = f"file://{directory}/rendezvous"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
        workload = load_workload("examples.place_names", ROOT)
        (directory / "places").mkdir()
        ingest(directory / "places")
        fields = (dict(record.fields) for record in records(directory / "places"))
        manifest = write_plain(fields, directory / "shards", records_per_shard=2048)
        sealed = place(manifest, directory / "shards", directory)
        loader = load(sealed, manifest.shards, workload)
        training = Training(workload)
        with closing(loader.batches(0, NUM_STEPS * BATCH)) as batches:
            kept = list(batches)
        gives, takes, waiting = [], [], []
        training.run(iter(kept), NUM_STEPS)
        for turn in range(REPETITIONS):
            gives.append(measure_loader(loader))
            seconds = sum(training.run(iter(kept), NUM_STEPS).values())
            takes.append(NUM_STEPS * BATCH / seconds)
            cursor = turn * NUM_STEPS * BATCH
            with closing(prefetch(loader.batches(cursor, cursor + 2 * NUM_STEPS * BATCH))) as both:
                training.run(islice(both, NUM_STEPS), NUM_STEPS)  # the first window is opened
                split = training.run(both, NUM_STEPS)
            waiting.append(split["data_wait"] / sum(split.values()))
        dist.destroy_process_group()
    share = median(waiting)
    publish(
        "loader",
        "samples/s",
        [
            Row(
                case="loader, against the step",
                ours=median(gives),
                reference=median(takes),
                ratio=median(gives) / median(takes),
                target=f"at least {LEAST_RATIO:.0f} times",
                holds=median(gives) >= LEAST_RATIO * median(takes),
            ),
            Row(
                case="data wait, share of the step",
                ours=share,
                reference=1.0,
                ratio=share,
                target=f"under {MOST_WAITING:.2f}",
                holds=share < MOST_WAITING,
            ),
        ],
    )


if __name__ == "__main__":
    main()
