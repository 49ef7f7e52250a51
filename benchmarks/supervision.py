"""What supervision costs a training in which nothing goes wrong.

Beside the ranks: one training under the supervisor, in which everything but its ranks (the stage
with the finder of hangs and stragglers, the nodes, torchrun's agents) is stopped and let go on in
turns. Inside the ranks: the same steps with the timer and the heartbeat and without, in blocks that
take turns. Each ratio is the median of those of neighbours, so that what drifts plays no part.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.recovery import await_directory, await_steps
from benchmarks.table import Row, publish
from tests.training.parallel_steps import make_places, places
from tests.training.ranks import run_ranks
from tests.workspaces import PARAMS, make_workspace
from training.config import TrainConfig
from training.heartbeat import read_beats
from training.phases import PHASES

PAIRS, WINDOW_SECONDS = 24, 1.5
ROUNDS, BLOCK_STEPS = 40, 20
LIMIT = 1.01
_SETTLE_STEPS = 600
"""MLflow, which is loaded beside the first ones, is there by then."""
_HIDDEN = 50_000
"""A step of the toy workload takes some ten milliseconds with it, as the main job's does."""


def main() -> None:
    cases = {
        "processes beside two ranks": measure_beside(),
        "timer and heartbeat inside two ranks": max(run_ranks(2, measure_inside), key=_ratio_of),
    }
    rows = [
        Row(case, median(with_it), median(without), _ratio_of((with_it, without)), "", True)
        for case, (with_it, without) in cases.items()
    ]
    ratio = rows[0].ratio * rows[1].ratio
    together = Row(
        case="both, on a step as long as the main job's",
        ours=rows[1].reference * ratio,
        reference=rows[1].reference,
        ratio=ratio,
        target=f"at most {LIMIT} times",
        holds=ratio <= LIMIT,
    )
    publish("supervision", "ms", [*rows, together])


Pairs = tuple[list[float], list[float]]
"""Milliseconds a step with and without, neighbours at the same place."""


def _ratio_of(pairs: Pairs) -> float:
    return median(one / other for one, other in zip(*pairs, strict=True))


def measure_beside() -> Pairs:
    train = PARAMS["train"] | {
        "steps": 10_000_000,
        "checkpoint": {"every_steps": 10_000_000, "keep": 1},
        "log_every_steps": 20,
        "model": {"hidden": _HIDDEN},
    }
    with tempfile.TemporaryDirectory() as name:
        workspace = make_workspace(Path(name) / "w", train=train)
        for stage in ("ingest", "shard", "upload"):
            workspace.run("convoy", "stage", stage)
        training = workspace.start("convoy", "stage", "train")
        try:
            run = await_directory(workspace.path)
            beats = await_steps(run, set(), _SETTLE_STEPS)
            ranks = {beat.pid for beat in beats}
            stage_process = psutil.Process(training.pid)
            others = [c for c in stage_process.children(recursive=True) if c.pid not in ranks]
            pairs: Pairs = ([], [])
            for number in range(2 * PAIRS):
                # Which of a pair comes first changes from pair to pair.
                is_supervised = number % 4 in (0, 3)
                for process in (stage_process, *others):
                    process.resume() if is_supervised else process.suspend()
                pairs[not is_supervised].append(_time_steps(run))
            return pairs
        finally:
            training.kill()
            training.communicate()


def _time_steps(run: Path) -> float:
    """Milliseconds a step over a window, by where the ranks say that they are."""
    first, began = read_beats(run)[0].step, time.monotonic()
    time.sleep(WINDOW_SECONDS)
    last, ended = read_beats(run)[0].step, time.monotonic()
    return 1000 * (ended - began) / (last - first)


class Untimed:
    """Stands where the timer does, and does nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self, index: int) -> None:
        pass

    def change(self, index: int) -> None:
        pass

    def leave(self) -> None:
        pass

    def watch_backward(self, loss: Any) -> None:
        pass


def measure_inside() -> Pairs:
    """In each rank: the steps of the trainer, without data and log."""
    import torch
    import torch.distributed as dist

    from training.heartbeat import Heartbeat
    from training.timing import StepTimer

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[dist.get_rank()]})
    with tempfile.TemporaryDirectory() as name:
        heartbeat = Heartbeat(Path(name), dist.get_rank())
        timed = StepTimer(on_phase=heartbeat.enter)
        take = _build_step()
        number = 0

        def block(timer: Any) -> float:
            nonlocal number
            dist.barrier()
            began = time.perf_counter()
            for _ in range(BLOCK_STEPS):
                number += 1
                if timer is timed:
                    heartbeat.begin_step(number, timed.seconds)
                take(timer)
            if timer is timed:
                timed.take()
            return 1000 * (time.perf_counter() - began) / BLOCK_STEPS

        torch.set_num_threads(1)
        pairs: Pairs = ([], [])
        for timer in (timed, Untimed()):
            block(timer)
        for turn in range(ROUNDS):
            order = [0, 1] if turn % 2 else [1, 0]
            for which in order:
                pairs[which].append(block([timed, Untimed()][which]))
        return pairs


def _build_step() -> Callable[[Any], None]:
    import torch.distributed as dist

    from training.optimization import Gradients, build_optimizers, take_step
    from training.parallel import build_mesh, choose_device, parallelize

    config = TrainConfig.model_validate(
        {
            "region": "eu",
            "steps": 1,
            "global_batch": 32,
            "model": {"max_length": 32, "width": 64, "num_heads": 4, "num_layers": 3},
            "dims": {"dp_replicate": 2},
        }
    )
    workload = places()
    model = parallelize(
        workload, workload.model(config.model), config, build_mesh(config.dims, choose_device())
    )
    optimizers = build_optimizers(model.parts, config.optimizer)
    gradients = Gradients(model.parts, model.stages)
    inputs, target = workload.collate(make_places(16, dist.get_rank()))

    def step(timer: Any) -> None:
        with timer.phase("data_wait"):
            pass
        model.forward_backward(inputs, target, timer)
        timer.enter(PHASES.index("optimizer"))
        gradients.clip(config.optimizer.grad_clip)
        take_step(optimizers, config.optimizer.lr)
        timer.change(PHASES.index("communication"))
        timer.leave()

    return step


if __name__ == "__main__":
    main()
