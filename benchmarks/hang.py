"""From SIGSTOP of a worker to the message that names its rank.

Two workers of the toy workload of the tests under the supervisor, at its own steps of some
milliseconds and at steps that sleep; one SIGSTOP after another in a run that goes on, of each rank
in turn. What is timed ends where the user reads it, in the output of `convoy stage train`. The
reference is the bound: three median steps, of the steps before, and two seconds.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.recovery import await_directory, await_steps
from benchmarks.table import Row, publish
from tests.workspaces import PARAMS, make_workspace

STOPS = 12
"""In each run."""
_SETTLE_STEPS = 12
_BOUND_STEPS, _BOUND_SECONDS = 3, 2.0


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for sleep in (0.0, 0.2):
            with _training(Path(name) / f"sleep-{sleep}", sleep) as (run, output):
                measured = [_name(run, output, number) for number in range(STOPS)]
            seconds = [taken for taken, _ in measured]
            bound = median(allowed for _, allowed in measured)
            worst, its_bound = max(measured, key=lambda one: one[0] - one[1])
            case = f"steps of {(bound - _BOUND_SECONDS) / _BOUND_STEPS * 1000:.0f} ms"
            for what, ours, reference in (
                ("median", median(seconds), bound),
                ("worst", worst, its_bound),
            ):
                row = Row(
                    case=f"SIGSTOP of one of two workers to its name, {case}, {what} of {STOPS}",
                    ours=ours,
                    reference=reference,
                    ratio=ours / reference,
                    target="at most 3 median steps + 2 s",
                    holds=ours <= reference,
                )
                rows.append(row)
    publish("hang", "s", rows)


def _name(run: Path, output: Path, number: int) -> tuple[float, float]:
    """Stop a rank once both are well under way; seconds until it is named, and the bound."""
    beats = await_steps(run, set(), _SETTLE_STEPS)
    step_seconds = [beat.step_seconds for beat in beats]
    rank = number % 2
    started = time.monotonic()
    os.kill(beats[rank].pid, signal.SIGSTOP)
    said: list[str] = []
    while len(said) <= number:
        if time.monotonic() > started + 60:
            raise TimeoutError(f"{run}: nothing was said of rank {rank}")
        time.sleep(0.002)
        said = [line for line in output.read_text().splitlines() if "the ranks that ans" in line]
    taken = time.monotonic() - started
    if not said[-1].startswith(f"train: rank {rank} is stopped in "):
        raise AssertionError(f"{run}: rank {rank} was stopped, and it says: {said[-1]}")
    await_steps(run, {beat.pid for beat in beats}, 1)
    return taken, _BOUND_STEPS * median(step_seconds) + _BOUND_SECONDS


@contextmanager
def _training(path: Path, sleep: float) -> Iterator[tuple[Path, Path]]:
    """The run's directory, and the file with what its stage says."""
    train = PARAMS["train"] | {
        "steps": 10_000_000,
        "checkpoint": {"every_steps": 20, "keep": 2},
        "log_every_steps": 20,
        "max_restarts": STOPS + 1,
    }
    workspace = make_workspace(path, train=train)
    module = path / "toy_workload.py"
    slow = f"    __import__('time').sleep({sleep})\n    return cross_entropy"
    module.write_text(module.read_text().replace("    return cross_entropy", slow))
    for stage in ("ingest", "shard", "upload"):
        workspace.run("convoy", "stage", stage)
    output = path / "output.txt"
    with output.open("wb") as file:
        training = subprocess.Popen(
            ["convoy", "stage", "train"],
            cwd=path,
            env=os.environ | workspace.environment,
            stdout=file,
            stderr=file,
        )
    try:
        yield await_directory(path), output
    finally:
        training.kill()
        training.wait()


if __name__ == "__main__":
    main()
