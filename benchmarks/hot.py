"""What the survivors of a kill lose in hot mode, and what hot mode costs where nobody dies.

Three replicas of the toy workload of the tests, with quick steps, and with such as take a device
0.3 s. A pause is the longest time from the kill, or from a later step, to the next step that both
survivors have made, until the newcomer joins; another one is then. Medians over all kills.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, publish
from tests.workspaces import PARAMS, Workspace, make_workspace
from training.heartbeat import Beat, read_beats

KILLS = 12
_SETTLE_STEPS = 4
_CALM_STEPS = 600
_BATCH = 24
_SLEEP = """
_loss = loss
def loss(output, target):
    import time
    time.sleep({seconds} * len(target))
    return _loss(output, target)
"""


@dataclass(frozen=True)
class _Loss:
    """What one kill cost the survivors."""

    pause: float
    join_pause: float
    """When the newcomer came."""
    num_void: int
    """Steps that they made again."""


def main() -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        for case, seconds in (("quick steps", 0.0), ("steps of 0.3 s", 0.3)):
            path = Path(name) / case.replace(" ", "-")
            with _training(path, "hot", 10_000_000, seconds / (_BATCH // 3)) as run:
                step, losses = _kill(run)
            limit = 1.5 * step + 1.0
            pause = median(one.pause for one in losses)
            rows.append(
                Row(f"{case}: pause of the survivors", pause, step, pause / step, "ours <= 1.5 x "
                    "reference + 1 s", pause <= limit)
            )  # fmt: skip
            worst = max(one.pause for one in losses)
            rows.append(Row(f"{case}: the longest pause", worst, step, worst / step, "", True))
            join = median(one.join_pause for one in losses)
            rows.append(Row(f"{case}: pause when it is back", join, step, join / step, "", True))
            lost = max(one.num_void for one in losses)
            rows.append(
                Row(f"{case}: steps lost, most (count)", lost, 1, lost, "at most 1", lost <= 1)
            )
        rows += [_calm(Path(name), *case) for case in (("quick steps", 0.0), ("0.1 s", 0.1))]
    publish("hot", "s", rows)


def _kill(run: Path) -> tuple[float, list[_Loss]]:
    """The usual step, and what each kill cost."""
    seconds: list[float] = []
    losses = []
    for number in range(KILLS):
        before = _await_steps(run)
        seconds.append(median(beat.step_seconds for beat in before.values()))
        losses.append(_follow(run, before, number % 3))
    return median(seconds), losses


def _follow(run: Path, before: Mapping[int, Beat], victim: int) -> _Loss:
    survivors = [rank for rank in before if rank != victim]
    voids = {rank: before[rank].num_void for rank in survivors}
    step = min(before[rank].step for rank in survivors)
    os.kill(before[victim].pid, signal.SIGKILL)
    killed = last = time.monotonic()
    pauses, joined = {False: 0.0, True: 0.0}, False
    join_step = None
    deadline = last + 60
    while time.monotonic() < deadline:
        beats = {beat.rank: beat for beat in read_beats(run)}
        newcomer = beats.get(victim)
        joined = bool(newcomer and newcomer.pid != before[victim].pid and newcomer.step)
        now_step = min(beats[rank].step for rank in survivors)
        if now_step > step:
            now = time.monotonic()
            # Where the newcomer is there before the next step, it still is the pause of the kill.
            is_its = joined and last > killed
            pauses[is_its] = max(pauses[is_its], now - last)
            last, step = now, now_step
            if joined:
                join_step = join_step or step
                if step > join_step + 3:
                    num_void = max(beats[r].num_void - voids[r] for r in survivors)
                    return _Loss(pauses[False], pauses[True], num_void)
        time.sleep(0.002)
    raise TimeoutError(f"{run}: nobody came in the place of replica {victim}")


def _await_steps(run: Path) -> dict[int, Beat]:
    """All three, when each has made some steps."""
    first: dict[int, int] = {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = [beat for beat in read_beats(run) if beat.step]
        for beat in beats:
            first.setdefault(beat.pid, beat.step)
        if len(beats) == 3 and all(b.step >= first[b.pid] + _SETTLE_STEPS for b in beats):
            return {beat.rank: beat for beat in beats}
        time.sleep(0.005)
    raise TimeoutError(f"{run}: the training did not go on")


def _calm(directory: Path, case: str, seconds: float) -> Row:
    """A step where nobody dies, in both modes by turns."""
    taken: dict[str, list[float]] = {"hot": [], "restart": []}
    steps = _CALM_STEPS if not seconds else 60
    for number in range(1 if seconds else 2):
        for mode, found in taken.items():
            path = directory / f"calm-{mode}-{number}-{seconds}"
            with _training(path, mode, steps, seconds / (_BATCH // 3)) as run:
                found += _measure(run, steps)
    hot, restart = median(taken["hot"]), median(taken["restart"])
    return Row(f"{case}: a step where nobody dies", hot, restart, hot / restart, "", True)


def _measure(run: Path, last_step: int) -> list[float]:
    seconds: dict[int, float] = {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        beats = read_beats(run)
        seconds |= {beat.step: beat.step_seconds for beat in beats if beat.step > _SETTLE_STEPS}
        if any(beat.step >= last_step for beat in beats):
            return list(seconds.values())
        time.sleep(0.003)
    raise TimeoutError(f"{run}: the training did not end")


@contextmanager
def _training(path: Path, mode: str, steps: int, sample_seconds: float) -> Iterator[Path]:
    train: dict[str, Any] = PARAMS["train"] | {
        "steps": steps,
        "dims": {"dp_replicate": 3},
        "global_batch": _BATCH,
        "checkpoint": {"every_steps": 1000, "keep": 2},
        "log_every_steps": 20,
        "max_restarts": 2 * KILLS,
        "recovery": {"mode": mode},
    }
    workspace: Workspace = make_workspace(path, train=train)
    if sample_seconds:
        module = path / "toy_workload.py"
        module.write_text(module.read_text() + _SLEEP.format(seconds=sample_seconds))
    for stage in ("ingest", "shard", "upload"):
        workspace.run("convoy", "stage", stage)
    training = workspace.start("convoy", "stage", "train")
    try:
        yield _await_directory(path)
    finally:
        training.kill()
        training.communicate()


def _await_directory(path: Path) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for found in path.glob(".convoy/runs/*/progress"):
            return found.parent
        time.sleep(0.05)
    raise TimeoutError(f"{path}: the training did not start")


if __name__ == "__main__":
    main()
