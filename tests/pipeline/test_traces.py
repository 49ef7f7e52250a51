"""Which rank waits for which, from the traces of real ranks and from traces built here."""

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import WorkspaceError
from pipeline.profile_page import render_profile
from pipeline.traces import compare_traces, read_traces
from tests.training.ranks import run_ranks


def make_trace(spans: list[tuple[str, float, float]], ahead: float = 0.0, size: int = 2) -> Any:
    """Spans in milliseconds, on a clock that is so many ahead."""
    return {
        "distributedInfo": {"world_size": 2, "pg_config": [{"pg_size": 2}, {"pg_size": size}]},
        "traceEvents": [
            {"ph": "X", "name": name, "ts": 1000 * (start + ahead), "dur": 1000 * (end - start)}
            for name, start, end in spans
        ],
    }


def test_the_last_to_arrive_is_waited_for_whatever_the_clocks_say() -> None:
    traces = compare_traces(
        {
            0: make_trace(
                [("gloo:all_reduce", 10, 15), ("aten::mm", 0, 1), ("gloo:barrier", 20, 30)]
            ),
            1: make_trace([("gloo:all_reduce", 14, 15), ("gloo:barrier", 18, 30)], ahead=500),
        }
    )
    first, second = traces.meetings
    assert (first.name, first.last, first.waits) == ("all_reduce", 1, {0: 4, 1: 0})
    assert (second.name, second.last, second.waits) == ("barrier", 0, {0: 0, 1: 2})
    assert traces.waited == {(0, 1): 4, (1, 0): 2}
    assert [span.start for span in traces.spans[1]] == [4, 8]


def test_groups_of_some_ranks_are_shown_and_not_compared() -> None:
    spans = [("gloo:all_reduce", 10.0, 15.0)]
    traces = compare_traces({0: make_trace(spans, size=4), 1: make_trace(spans, size=4)})
    assert traces.meetings == ()
    assert len(traces.spans[0]) == 1
    assert "groups of their own" in render_profile("toy", traces, Path())


def _profile(directory: Path) -> None:
    import torch
    import torch.distributed as dist

    from training.profiling import StepProfiler

    with StepProfiler(directory, 2) as profiler:
        for _ in range(6):
            time.sleep(0.2 * dist.get_rank())
            dist.all_reduce(torch.ones(1))
            profiler.step()


def test_ranks_that_are_profiled(tmp_path: Path) -> None:
    run_ranks(2, _profile, tmp_path)
    traces = read_traces(tmp_path)
    assert [meeting.last for meeting in traces.meetings] == [1, 1]  # two steps, no more
    assert traces.waited[0, 1] > 200
    page = render_profile("<b>toy</b>", traces, tmp_path)
    assert "Most of all rank 0 waits for rank 1" in page
    assert "<b>toy</b>" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|src=", page)
    assert page.count("<rect") == 4


def test_a_run_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"set params\.yaml: train\.profile"):
        read_traces(tmp_path)


def test_a_trace_that_was_cut(tmp_path: Path) -> None:
    content = gzip.compress(json.dumps(make_trace([])).encode())
    (tmp_path / "trace-0.json.gz").write_bytes(content[:-9])
    with pytest.raises(WorkspaceError, match="is not a whole trace"):
        read_traces(tmp_path)
