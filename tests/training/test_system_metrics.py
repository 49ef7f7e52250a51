"""What a training takes of its machine is noted while it runs."""

import json
import time
from pathlib import Path

import pytest

from training.heartbeat import Heartbeat
from training.outbox import open_outbox
from training.system_metrics import SystemMeter


def test_what_ranks_take_is_noted_beside_them(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0)  # this process is the rank
    with open_outbox(tmp_path / "outbox", "run") as outbox:
        outbox.note_metrics({"loss": 1.0}, 7)
        with SystemMeter(outbox, tmp_path, 0.05):
            deadline = time.monotonic() + 60
            while outbox.path.read_text().count("\n") < 4 and time.monotonic() < deadline:
                sum(range(10_000))
        _, first, second, *_ = map(json.loads, outbox.path.read_text().splitlines())
        assert outbox.last_step == 7  # they are of no step: a resumed run goes on after its last
    assert "step" not in second
    assert first["metrics"].keys() == second["metrics"].keys()
    assert all(name.startswith("system/") for name in first["metrics"])
    assert second["metrics"]["system/ranks_memory_megabytes"] > 5
    assert 0 < second["metrics"]["system/system_memory_usage_percentage"] < 100
    assert second["metrics"]["system/disk_available_megabytes"] > 0


def test_the_processor_time_of_ranks_by_the_time_that_passed(tmp_path: Path) -> None:
    Heartbeat(tmp_path, 0)
    with open_outbox(tmp_path / "outbox", "run") as outbox:
        meter = SystemMeter(outbox, tmp_path, 3600)
        assert meter.sample()["system/ranks_cpu_percentage"] == 0
        began, until = time.monotonic(), time.process_time() + 0.5
        while time.process_time() < until:
            pass
        busy = meter.sample()["system/ranks_cpu_percentage"]
        elapsed = time.monotonic() - began
    assert busy == pytest.approx(100 * 0.5 / elapsed, rel=0.3)
