"""From SIGKILL of a worker to the next completed step, against plain torchrun.

Two workers of the toy workload of the tests under the supervisor, and a bare script of the same
model under `torchrun --max-restarts` with its known remedy set. Alternating, a kill at a time in a
run that goes on; the median of all kills.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.table import Row, publish
from tests.workspaces import PARAMS, make_workspace
from training.heartbeat import Beat, read_beats

KILLS = 6
"""In each run; there are two runs of each."""
_SETTLE_STEPS = 50


def main() -> None:
    ours: list[float] = []
    reference: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(2):
            with _convoy(Path(name) / f"convoy-{number}") as run:
                ours += [_recover(run) for _ in range(KILLS)]
            with _torchrun(Path(name) / f"torchrun-{number}") as run:
                reference += [_recover(run) for _ in range(KILLS)]
    ratio = median(ours) / median(reference)
    case = "SIGKILL of one of two workers to the next completed step, median"
    rows = [Row(case, median(ours), median(reference), ratio, "at most 0.3 times", ratio <= 0.3)]
    ratio = max(ours) / max(reference)
    rows.append(Row("the slowest of them", max(ours), max(reference), ratio, "", True))
    publish("recovery", "s", rows)


def _recover(run: Path) -> float:
    """Kill rank 1 once both are well under way; seconds until both have completed a step again."""
    before = await_steps(run, set(), _SETTLE_STEPS)
    victim = before[1].pid
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    await_steps(run, {beat.pid for beat in before}, 1)
    return time.monotonic() - started


def await_steps(run: Path, gone: set[int], num_steps: int) -> list[Beat]:
    """Both ranks, none of them of these processes, when they have completed some steps."""
    first: dict[int, int] = {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = [b for b in read_beats(run) if b.pid not in gone and b.step > 0]
        for beat in beats:
            first.setdefault(beat.pid, beat.step)
        if len(beats) == 2 and all(b.step >= first[b.pid] + num_steps for b in beats):
            return beats
        time.sleep(0.01)
    raise TimeoutError(f"{run}: the training did not go on")


@contextmanager
def _convoy(path: Path) -> Iterator[Path]:
    train = PARAMS["train"] | {
        "steps": 10_000_000,
        "checkpoint": {"every_steps": 20, "keep": 2},
        "log_every_steps": 20,
        "max_restarts": 2 * KILLS,
    }
    workspace = make_workspace(path, train=train)
    for stage in ("ingest", "shard", "upload"):
        workspace.run("convoy", "stage", stage)
    training = workspace.start("convoy", "stage", "train")
    try:
        yield await_directory(path)
    finally:
        training.kill()
        training.communicate()


def await_directory(path: Path) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for found in path.glob(".convoy/runs/*/progress"):
            return found.parent
        time.sleep(0.05)
    raise TimeoutError(f"{path}: the training did not start")


@contextmanager
def _torchrun(path: Path) -> Iterator[Path]:
    path.mkdir()
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *(f"--max-restarts={2 * KILLS}", "--monitor-interval=0.1"),
        *("-m", "benchmarks.torchrun_script", str(path)),
    ]
    environment = os.environ | {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with (path / "log").open("wb") as output:
        run = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, process_group=0
        )
    try:
        yield path
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


if __name__ == "__main__":
    main()
