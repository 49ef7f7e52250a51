"""What each way to synchronise trades, on the place names with two workers.

Every way trains the same model on the same samples in the same order, from memory. Quality: bits
for each held-out byte at the end. Volume: bytes that cross the loopback interface for each global
batch, of both workers together, so run it where nothing else uses that interface (for example
`unshare -n sh -c 'ip link set lo up; python -m benchmarks.synchronization'`, as root).
Time: seconds
for each global batch, the median of short runs that alternate with DDP's.

`--quality` and `--time` do one half alone.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, publish
from examples import place_names
from tests.training.ranks import run_ranks
from training.config import TrainConfig

NUM_WORKERS = 2
BATCH = 32
QUALITY_STEPS = 800
TIME_STEPS = 64
ROUNDS = 3
SLOW_SECONDS = 0.05
MODEL = {"max_length": 32, "width": 64, "num_heads": 4, "num_layers": 3}
OPTIMIZER = {
    "lr": 0.005,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "warmup_steps": 60,
    "final_lr_ratio": 0.0,
    "grad_clip": 10.0,
}
REFERENCE = "every step"
CASES: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "fp16": {"synchronize": {"compress": "fp16"}},
    "bf16": {"synchronize": {"compress": "bf16"}},
    "powersgd, rank 4": {"synchronize": {"compress": "powersgd"}},
    "local_sgd, every 8": {"synchronize": {"mode": "local_sgd", "every_steps": 8}},
    "local_sgd, every 32": {"synchronize": {"mode": "local_sgd", "every_steps": 32}},
    "diloco, every 32": {"synchronize": {"mode": "diloco", "every_steps": 32}},
    "diloco, every 32, 4 fragments, 4 overlapped": {
        "synchronize": {
            "mode": "diloco",
            "every_steps": 32,
            "num_fragments": 4,
            "overlap_steps": 4,
        }
    },
    "asynchronous": {"synchronize": {"mode": "asynchronous", "every_steps": 200}},
    "reproducible, 2 virtual ranks": {"reproducible": True, "virtual_ranks": 2},
    "reproducible, 8 virtual ranks": {"reproducible": True, "virtual_ranks": 8},
}
SLOWED = (REFERENCE, "local_sgd, every 32", "asynchronous")
"""Also timed with one worker slower by SLOW_SECONDS a step."""

Records = Sequence[dict[str, Any]]


def read_places(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Places to train on and, one in twenty, held out."""
    fields = [dict(record.fields) for record in place_names.records(directory)]
    held_out = fields[::20]
    return [f for number, f in enumerate(fields) if number % 20], held_out


def configure(case: dict[str, Any], num_steps: int) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "region": "eu",
            "steps": num_steps,
            "global_batch": BATCH,
            "dims": {"dp_replicate": NUM_WORKERS},
            "optimizer": OPTIMIZER,
        }
        | case
    )


def train(directory: Path, case: dict[str, Any], num_steps: int, slow_seconds: float) -> Any:
    """In each rank: bits per held-out byte, bytes and seconds for each global batch."""
    import torch
    import torch.distributed as dist

    from training.optimization import Gradients, build_optimizers, learning_rate, take_step
    from training.parallel import build_mesh, parallelize
    from training.synchronization import build_synchronizer
    from training.timing import StepTimer
    from training.workload import load_workload

    config = configure(case, num_steps)
    workload = load_workload("examples.place_names", Path(__file__).parent.parent)
    records, held_out = read_places(directory)
    torch.manual_seed(0)
    mesh = build_mesh(config.dims, torch.device("cpu"))
    model = parallelize(workload, workload.model(MODEL), config, mesh)
    optimizers = build_optimizers(model.parts, config.optimizer)
    gradients = Gradients(model.parts)
    synchronizer = build_synchronizer(config, model, optimizers)
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(1)).tolist()
    timer = StepTimer()
    dist.barrier()
    started, sent = time.perf_counter(), read_loopback_bytes()
    for step, samples in choose_samples(config, synchronizer, order, model.batches_per_step):
        for part in samples:
            inputs, target = workload.collate([records[index] for index in part])
            model.forward_backward(inputs, target, timer)
        if slow_seconds and dist.get_rank() == 1:
            time.sleep(slow_seconds)
        gradients.clip(config.optimizer.grad_clip)
        take_step(optimizers, learning_rate(config.optimizer, step, config.steps))
        gradients.forget()
        synchronizer.after_step(step)
    synchronizer.finish()
    dist.barrier()
    seconds = time.perf_counter() - started
    num_bytes = read_loopback_bytes() - sent
    bits = measure(model.parts[0], held_out) if num_steps == QUALITY_STEPS else math.nan
    return bits, num_bytes / num_steps, seconds / num_steps


def choose_samples(
    config: TrainConfig, synchronizer: Any, order: list[int], batches_per_step: int
) -> Iterator[tuple[int, list[list[int]]]]:
    """The steps of this rank, with the samples of each of its batches."""
    import torch.distributed as dist

    from training.asynchronous import Asynchronous

    def batch(number: int) -> list[int]:
        return [order[i % len(order)] for i in range(number * BATCH, (number + 1) * BATCH)]

    if isinstance(synchronizer, Asynchronous):
        done = 0
        while done < config.steps:
            for number in synchronizer.claims(done, config.steps):
                yield number + 1, [batch(number)]
            done = synchronizer.meeting(done, config.steps)
        return
    own = BATCH // NUM_WORKERS
    size = own // batches_per_step
    for number in range(config.steps):
        mine = batch(number)[dist.get_rank() * own :][:own]
        yield number + 1, [mine[first : first + size] for first in range(0, own, size)]


def measure(model: Any, records: Records) -> float:
    """Bits for each held-out byte."""
    import torch

    total = weight = 0.0
    with torch.inference_mode():
        for first in range(0, len(records), 256):
            inputs, target = place_names.collate(records[first : first + 256])
            bits, num_bytes = place_names.metrics(model(inputs), target)["bits_per_byte"]
            total, weight = total + bits, weight + num_bytes
    return total / weight


def read_loopback_bytes() -> int:
    """What the loopback interface has carried."""
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line]
    return int(line.split(":")[1].split()[0])


def run(directory: Path, name: str, num_steps: int, slow_seconds: float = 0.0) -> Any:
    """Rank 0's figures; all ranks measured the same bits."""
    ranks = run_ranks(NUM_WORKERS, train, directory, CASES[name], num_steps, slow_seconds)
    assert len({str(bits) for bits, _, _ in ranks}) == 1, name
    return ranks[0]


def measure_quality(directory: Path) -> None:
    found = {name: run(directory, name, QUALITY_STEPS) for name in CASES}
    for index, unit in enumerate(("bits per byte", "bytes a batch")):
        reference = found[REFERENCE][index]
        rows = [
            Row(name, figures[index], reference, figures[index] / reference, "", True)
            for name, figures in found.items()
        ]
        publish(f"synchronization-{unit.split()[0]}", unit, rows)


def measure_time(directory: Path) -> None:
    cases = [(name, 0.0) for name in CASES] + [(name, SLOW_SECONDS) for name in SLOWED]
    found: dict[tuple[str, float], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for name, slow_seconds in cases:
            found[name, slow_seconds].append(run(directory, name, TIME_STEPS, slow_seconds)[2])
    rows = []
    for (name, slow_seconds), seconds in found.items():
        reference = median(found[REFERENCE, slow_seconds])
        case = f"{name}, one worker slowed" if slow_seconds else name
        ratio = median(seconds) / reference
        rows.append(Row(case, 1000 * median(seconds), 1000 * reference, ratio, "", True))
    publish("synchronization-time", "ms a batch", rows)


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    chosen = set(sys.argv[1:]) or {"--quality", "--time"}
    with tempfile.TemporaryDirectory() as directory:
        place_names.ingest(Path(directory))
        if "--quality" in chosen:
            measure_quality(Path(directory))
        if "--time" in chosen:
            measure_time(Path(directory))


if __name__ == "__main__":
    main()
