"""What is a hang, of real processes: one that waits, one that is given no processor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.workspaces import ROOT
from training.activity import read_activity
from training.hang import Hang, HangWatch
from training.heartbeat import read_beats

RANK = """
import os, sys, time
from pathlib import Path
from training.heartbeat import Heartbeat
from training.phases import PHASES
beat = Heartbeat(Path(sys.argv[1]), 0)
for step in (1, 2):
    beat.begin_step(step)
    time.sleep(0.01)
beat.enter(PHASES.index("forward"))
if sys.argv[2] == "waits":
    time.sleep(3600)
os.nice(10)
while True:
    pass
"""
PATIENCE = 600.0


@contextmanager
def rank(directory: Path, what: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says that it is in its second step, after one of 10 ms."""
    command = [sys.executable, "-c", RANK, str(directory), what]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def loaded_processor(victim: int) -> Iterator[None]:
    """A process shares one processor with others that leave it next to nothing of it."""
    processor = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(victim, processor)
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for burner in burners:
            os.sched_setaffinity(burner.pid, processor)
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def watch(directory: Path, seconds: float) -> Hang | None:
    """What is found in so long, after the second step has begun."""
    watching = HangWatch(PATIENCE)
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        beats = read_beats(directory)
        if deadline is None and beats and beats[0].step == 2 and beats[0].phase == "forward":
            deadline = time.monotonic() + seconds
        if found := watching.look(beats, 1):
            return found
        time.sleep(0.1)
    return None


def test_a_rank_that_waits(tmp_path: Path) -> None:
    with rank(tmp_path, "waits"):
        found = watch(tmp_path, 60)
    assert found
    assert "rank 0 makes no progress in forward of step 2" in found.why


def test_a_rank_that_is_given_no_processor_is_not_one_that_is_stopped(tmp_path: Path) -> None:
    with rank(tmp_path, "works") as process, loaded_processor(process.pid):
        began, before = time.monotonic(), read_activity(process.pid)
        assert watch(tmp_path, 3) is None
        used = read_activity(process.pid).cpu_seconds - before.cpu_seconds
        assert used < 0.15 * (time.monotonic() - began)  # it really had next to nothing
        process.send_signal(signal.SIGSTOP)
        found = watch(tmp_path, 60)
    assert found
    assert "rank 0 is stopped in forward of step 2" in found.why
