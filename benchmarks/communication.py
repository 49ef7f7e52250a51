"""What a worker sends in a step and how long a step takes, for each layout and three sizes.

Raw material for a planner. Sent bytes are counted at torch's dispatcher, every collective and every
message of one step, as the ring algorithms send them (of n workers: all-reduce 2(n-1)/n of its
bytes, all-gather and reduce-scatter (n-1)/n of the whole). The formula beside them is what the
layout's theory says: see predict_bytes(). The steps are the trainer's, on tokens in memory, with a
thread a worker. Where workers share cores, seconds say what the work is and not what is gained.

Writes also artifacts/benchmarks/communication-rows.json, a line of numbers for each case.
"""

import json
import math
import time
from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.table import OUTPUT, Row, publish
from tests.training.ranks import run_ranks
from tests.workspaces import ROOT
from training.config import TrainConfig

BATCH, LENGTH = 8, 32
STEPS, WARM_UP = 3, 2
SIZES = {
    "1 M": {"width": 128, "num_heads": 4, "num_layers": 4},
    "10 M": {"width": 320, "num_heads": 8, "num_layers": 8},
    "50 M": {"width": 576, "num_heads": 8, "num_layers": 12},
}
LAYOUTS: tuple[dict[str, int], ...] = (
    {"dp_replicate": 2},
    {"dp_shard": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp_replicate": 4},
    {"dp_shard": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_replicate": 2, "tp": 2},
    {"dp_replicate": 2, "pp": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "pp": 2},
    {"tp": 2, "pp": 2},
)
TOLERANCE = 0.1
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Measured:
    """One layout of one size."""

    size: str
    dims: dict[str, int]
    num_parameters: int
    tokens: int
    """Of a step, all workers together."""
    step_seconds: float
    """Median, of the slowest worker."""
    sent_bytes: float
    """In a step, by the worker that sends most."""
    formula_bytes: float
    calls: dict[str, int]
    """Collectives and messages of a step, by kind, of that worker."""


def configure(size: str, dims: dict[str, int]) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "region": "eu",
            "steps": 1,
            "global_batch": BATCH,
            "model": {"max_length": LENGTH} | SIZES[size],
            "dims": {"dp_replicate": 1} | dims,
            "pipeline": {"schedule": "1f1b", "microbatches": 4},
        }
    )


def measure(config: TrainConfig) -> tuple[float, float, dict[str, int], int]:
    """In each rank: median seconds of a step, bytes that it sends, calls, and parameters held."""
    import torch
    import torch.distributed as dist

    from training.optimization import Gradients, build_optimizers, take_step
    from training.parallel import build_mesh, choose_device, parallelize
    from training.timing import StepTimer
    from training.workload import load_workload

    workload = load_workload("examples.place_names", ROOT)
    mesh = build_mesh(config.dims, choose_device())
    whole = workload.model(config.model)
    num_parameters = sum(parameter.numel() for parameter in whole.parameters())
    model = parallelize(workload, whole, config, mesh)
    del whole
    optimizers = build_optimizers(model.parts, config.optimizer)
    gradients = Gradients(model.parts, model.stages)
    tokens = torch.randint(1, 256, (BATCH // config.dims.num_replicas, LENGTH + 1))
    inputs, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    timer, seconds = StepTimer(), []

    def step() -> None:
        model.forward_backward(inputs, target, timer)
        gradients.clip(config.optimizer.grad_clip)
        take_step(optimizers, config.optimizer.lr)
        gradients.forget()

    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    with make_counter() as counter:
        step()
    return median(seconds[WARM_UP:]), counter.sent_bytes, dict(counter.calls), num_parameters


def make_counter() -> Any:
    """A context manager that counts what this rank sends: its `sent_bytes` and `calls`."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group
    from torch.utils._python_dispatch import TorchDispatchMode

    def first_bytes(value: Any) -> int:
        """Of the tensors in an argument, nested lists unpacked."""
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
        return sum(map(first_bytes, value)) if isinstance(value, list | tuple) else 0

    def ring_share(num_ranks: int) -> float:
        return (num_ranks - 1) / num_ranks

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.sent_bytes = 0.0
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            namespace, _, name = str(func).partition(".")
            name = name.removesuffix(".default")
            if namespace == "c10d":
                group = next(
                    dist.ProcessGroup.unbox(a)
                    for a in args
                    if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
                )
                self._count(name, args, group.size(), group.rank())
            elif namespace == "_c10d_functional":
                self._count_functional(name, args)
            return func(*args, **(kwargs or {}))

        def _count(self, name: str, args: Any, num_ranks: int, rank: int) -> None:
            share = ring_share(num_ranks)
            if name == "allreduce_":
                self._add("all_reduce", 2 * share * first_bytes(args[0]))
            elif name in ("_allgather_base_", "allgather_"):
                self._add("all_gather", share * first_bytes(args[0]))
            elif name == "_reduce_scatter_base_":
                self._add("reduce_scatter", share * first_bytes(args[1]))
            elif name == "send":
                self._add("send", first_bytes(args[0]))
            elif name == "broadcast_":
                self._add("broadcast", share * first_bytes(args[0]))

        def _count_functional(self, name: str, args: Any) -> None:
            if name == "all_reduce":
                share = ring_share(_resolve_process_group(args[2]).size())
                self._add("all_reduce", 2 * share * first_bytes(args[0]))
            elif name == "all_gather_into_tensor":
                self._add("all_gather", (args[1] - 1) * first_bytes(args[0]))
            elif name == "reduce_scatter_tensor":
                self._add("reduce_scatter", ring_share(args[2]) * first_bytes(args[0]))

        def _add(self, name: str, sent_bytes: float) -> None:
            self.calls[name] += 1
            self.sent_bytes += sent_bytes

    return Counting()


def predict_bytes(config: TrainConfig, num_parameters: int) -> float:
    """What the worker that sends most sends in a step, in theory.

    P: bytes of the parameters that it would hold without FSDP, A: of one layer's activations, L: of
    the logits, for its part of the batch.

    DDP 2(n-1)/n P: an all-reduce of the gradient. FSDP 3(n-1)/n P: two all-gathers of parameters
    and a reduce-scatter of the gradient; one all-gather in a pipeline, which keeps what it has
    gathered; with replicas, an all-reduce of the n-th part besides. TP of each layer six
    all-reduces of A (two forward, and backward one for each of the four matrices that read A), one
    more for the input of the head, and an all-gather of the logits. PP A to the next stage, or to
    the one before; stages are taken to be equal, though the first and last have more parameters.
    """
    dims, model = config.dims, config.model
    samples = BATCH // dims.num_replicas
    activations = samples * LENGTH * model["width"] * _FLOAT_BYTES
    logits = samples * LENGTH * 256 * _FLOAT_BYTES
    held = num_parameters * _FLOAT_BYTES / (dims.tp * dims.pp)
    layers = model["num_layers"] / dims.pp

    def share(n: int) -> float:
        return (n - 1) / n

    passes = 3 if dims.pp == 1 else 2
    sent = 2 * share(dims.dp_replicate) * held / dims.dp_shard
    sent += passes * share(dims.dp_shard) * held
    if dims.tp > 1:
        sent += 2 * share(dims.tp) * activations * (6 * layers + 1) + share(dims.tp) * logits
    if dims.pp > 1:
        sent += activations
    return sent


def run_case(size: str, dims: dict[str, int]) -> Measured:
    config = configure(size, dims)
    ranks = run_ranks(math.prod(dims.values()), measure, config, timeout_seconds=600)
    _, sent_bytes, calls, num_parameters = max(ranks, key=lambda rank: rank[1])
    return Measured(
        size=size,
        dims=dims,
        num_parameters=num_parameters,
        tokens=BATCH * LENGTH,
        step_seconds=max(rank[0] for rank in ranks),
        sent_bytes=sent_bytes,
        formula_bytes=predict_bytes(config, num_parameters),
        calls=calls,
    )


def main() -> None:
    found, volumes, seconds = [], [], []
    for size in SIZES:
        alone = run_case(size, {"dp_replicate": 1})
        found.append(alone)
        for dims in LAYOUTS:
            case = run_case(size, dims)
            found.append(case)
            name = f"{size}, {', '.join(f'{axis} {n}' for axis, n in dims.items())}"
            ratio = case.sent_bytes / case.formula_bytes
            volumes.append(
                Row(
                    case=name,
                    ours=case.sent_bytes / 1e6,
                    reference=case.formula_bytes / 1e6,
                    ratio=ratio,
                    target=f"within {TOLERANCE:.0%}",
                    holds=abs(ratio - 1) <= TOLERANCE,
                )
            )
            slower = case.step_seconds / alone.step_seconds
            seconds.append(Row(name, case.step_seconds, alone.step_seconds, slower, "", True))
    publish("communication", "MB sent in a step", volumes)
    publish("communication-seconds", "s a step; one worker", seconds)
    path = OUTPUT / "communication-rows.json"
    path.write_text(json.dumps([asdict(case) for case in found], indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
