"""Where a rank says that it is, read while it writes."""

import sys
import threading
import time
from pathlib import Path

from training.hang import HangWatch
from training.heartbeat import Heartbeat, clear_beats, read_beats
from training.phases import PHASES


def test_what_is_read_was_said(tmp_path: Path) -> None:
    assert read_beats(tmp_path) == []
    beat = Heartbeat(tmp_path, 3)
    [starting] = read_beats(tmp_path)
    assert (starting.rank, starting.step, starting.phase) == (3, 0, "starting")
    beat.begin_step(7)
    beat.enter(PHASES.index("backward"))
    [inside] = read_beats(tmp_path)
    assert (inside.step, inside.phase, inside.step_seconds) == (7, "backward", 0.0)
    beat.begin_step(8)
    [next_step] = read_beats(tmp_path)
    assert (next_step.step, next_step.phase) == (8, "other")
    assert 0 < next_step.step_seconds < 60
    beat.end()
    assert read_beats(tmp_path)[0].phase == "ended"
    clear_beats(tmp_path)
    assert read_beats(tmp_path) == []


def test_seconds_are_those_of_whole_steps(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 0)
    seconds = [5.0, 4.0, 3.0, 2.0, 1.0, 0.5, 9.0]  # before the first step, and last of no phase
    beat.begin_step(7, seconds)
    assert read_beats(tmp_path)[0].phase_seconds == (0.0,) * len(PHASES)
    seconds[1] += 1.5
    seconds[-1] += 7.0
    beat.enter(PHASES.index("backward"), now := time.monotonic())
    [inside] = read_beats(tmp_path)
    assert (inside.changed, inside.phase_seconds) == (now, (0.0,) * len(PHASES))
    beat.begin_step(8, seconds)
    assert read_beats(tmp_path)[0].phase_seconds == (0.0, 1.5, 0.0, 0.0, 0.0, 0.0)


def test_a_reader_never_sees_half_a_beat(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, 0)
    began = time.monotonic()
    stopped = threading.Event()

    def write() -> None:
        step = 0
        while not stopped.is_set():
            step += 1
            beat.begin_step(step)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # else each call of the kernel waits for the writer's turn to end
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5_000):
            [seen] = read_beats(tmp_path)
            assert began <= seen.changed <= time.monotonic()
    finally:
        stopped.set()
        thread.join()
        sys.setswitchinterval(usual)


def test_a_rank_that_never_begins_is_a_hang() -> None:
    watch = HangWatch(patience_seconds=0.05)
    assert watch.look([], 2) is None
    time.sleep(0.1)
    hang = watch.look([], 2)
    assert hang
    assert (hang.rank, "has not begun" in hang.why) == (0, True)
