"""An asynchronous sealed checkpoint against `torch.save` of the same 200 MB: what training waits
for, and when it is whole."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.table import Row, publish
from data.manifest import Manifest
from data.residency import Residency
from data.sealed_shards import open_region
from storage.access_log import AccessLog
from storage.region import Region
from training.checkpoint import Checkpoint, Checkpointer
from training.config import CheckpointConfig, ParallelDims, TrainConfig
from training.spec import TrainSpec

NUM_LAYERS, WIDTH = 16, 1024
"""16.8 million parameters: with AdamW's two averages 201 MB in float32."""
REPEATS = 9
STALL_TARGET = 1 / 8
WHOLE_TARGET = 3.0


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="convoy-bench-", dir=os.environ.get("TMPDIR")) as name:
        directory = Path(name)
        dist.init_process_group(
            "gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1
        )
        try:
            publish("checkpoint", "s", _measure(directory))
        finally:
            dist.destroy_process_group()


def _measure(directory: Path) -> list[Row]:
    model, optimizer, step = _make_training()
    on_disk = _open_checkpointer(directory / "disk", use_store=False)
    in_both = _open_checkpointer(directory / "both", use_store=True)
    steps: dict[str, list[float]] = {"idle": [], "during": []}
    times: dict[str, list[float]] = {name: [] for name in ("save", "stall", "disk", "both")}
    for number in range(REPEATS + 1):
        times["save"].append(_time(lambda: _save_plainly(model, optimizer, directory / "plain.pt")))
        stall, whole = _save(on_disk, number, model, optimizer)
        times["stall"].append(stall)
        times["disk"].append(whole)
        times["both"].append(_save(in_both, 2 * number, model, optimizer)[1])
        steps["idle"] += [_time(step) for _ in range(10)]
        in_both.save(Checkpoint(2 * number + 1, 0), [model], [optimizer])
        steps["during"] += [_time(step) for _ in range(10)]
        in_both.close()
    for place in ("disk", "both"):
        AccessLog(directory / place / "log.jsonl").close()
    # The first ones plan, and touch their memory for the first time.
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    idle, during = (statistics.median(steps[name][10:]) for name in ("idle", "during"))
    plain = medians["save"]
    return [
        _row("training waits", medians["stall"], plain, STALL_TARGET),
        _row("whole on disk (synced)", medians["disk"], plain, WHOLE_TARGET),
        _row("whole on disk and in a store (synced)", medians["both"], plain, WHOLE_TARGET),
        Row("a step while it is written", during, idle, during / idle, "", True),
    ]


def _row(case: str, ours: float, reference: float, target: float) -> Row:
    ratio = ours / reference
    return Row(case, ours, reference, ratio, f"at most {target:g}", ratio <= target)


def _make_training() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(16, WIDTH)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    return model, optimizer, step


def _save_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def _save(
    checkpointer: Checkpointer, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[float, float]:
    """Seconds until the call returns, and until the checkpoint is whole."""
    started = time.perf_counter()
    checkpointer.save(Checkpoint(step, 0), [model], [optimizer])
    stall = time.perf_counter() - started
    checkpointer.close()
    return stall, time.perf_counter() - started


def _open_checkpointer(directory: Path, *, use_store: bool) -> Checkpointer:
    region = Region(
        name="eu",
        jurisdiction="EU",
        store=f"file:{directory}/store",
        wrapping_key=f"file:{directory}/eu.key",
    )
    manifest = Manifest(dataset="benchmark", shards=())
    log = AccessLog(directory / "log.jsonl")
    spec = TrainSpec(
        root=directory,
        workload="none",
        config=TrainConfig(
            region="eu",
            dims=ParallelDims(dp_replicate=1),
            steps=1,
            global_batch=1,
            checkpoint=CheckpointConfig(store=use_store, keep=1, keep_best=False),
        ),
        primary="loss",
        manifest=directory / "manifest.json",
        region=region,
        residency=Residency(),
        access_log=directory / "log.jsonl",
        run_directory=directory / "run",
        fingerprint="0" * 64,
        tracking_uri="",
        mlflow_run_id="",
    )
    return Checkpointer(spec, open_region(manifest, region, log, writable=True))


def _time(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
