"""Which rank waits for which: the collectives in the traces of all ranks, put beside each other.

A rank arrives at a collective when its part begins, and all leave it together. So the ends of those
that all ranks take part in align their clocks, and the last to arrive is whom the others wait for.
"""

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.errors import WorkspaceError
from training.spec import trace_file

_SPAN = re.compile(r"(?:gloo|nccl):(\w+)$")
_JOINT = ("all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all")


@dataclass(frozen=True)
class Span:
    """One rank's part in one collective, in milliseconds since the first of all."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Meeting:
    """One collective of all ranks."""

    name: str
    last: int
    """The rank that arrived last."""
    start: float
    """When it did, in milliseconds."""
    waits: Mapping[int, float]
    """Milliseconds that each rank waited for it."""


@dataclass(frozen=True)
class Traces:
    """The collectives of a profile."""

    spans: Mapping[int, tuple[Span, ...]]
    """By rank, on one clock."""
    meetings: tuple[Meeting, ...]
    """None where ranks speak in groups of their own: a trace does not say which."""

    @property
    def waited(self) -> dict[tuple[int, int], float]:
        """Milliseconds in all that one rank waited for another."""
        sums: dict[tuple[int, int], float] = {}
        for meeting in self.meetings:
            for rank, wait in meeting.waits.items():
                if rank != meeting.last:
                    pair = (rank, meeting.last)
                    sums[pair] = sums.get(pair, 0.0) + wait
        return sums


def read_traces(directory: Path) -> Traces:
    """The traces that a run left. Raises WorkspaceError when there are none, or broken ones."""
    found: dict[int, dict[str, Any]] = {}
    for path in directory.glob(trace_file("*")):
        try:
            found[int(path.name.split("-")[1].split(".")[0])] = json.loads(
                gzip.decompress(path.read_bytes())
            )
        except (ValueError, OSError, EOFError):
            raise WorkspaceError(f"{path} is not a whole trace: train again with it") from None
    if not found:
        raise WorkspaceError(
            f"{directory} has no trace: set params.yaml: train.profile to a number of steps, for "
            "example 5, and run `convoy stage train`"
        )
    return compare_traces(dict(sorted(found.items())))


def compare_traces(traces: Mapping[int, Mapping[str, Any]]) -> Traces:
    """Chrome traces of the ranks, on one clock."""
    spans = {rank: _read_spans(trace) for rank, trace in traces.items()}
    names = {tuple(span.name for span in own) for own in spans.values()}
    together = len(names) == 1 and all(_is_flat(trace) for trace in traces.values())
    if together:
        spans = _align(spans)
    origin = min((span.start for own in spans.values() for span in own), default=0.0)
    spans = {rank: _shift(own, -origin) for rank, own in spans.items()}
    return Traces(spans, _meet(spans) if together else ())


def _read_spans(trace: Mapping[str, Any]) -> tuple[Span, ...]:
    spans = [
        Span(match[1], event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and (match := _SPAN.match(event.get("name", "")))
    ]
    return tuple(sorted(spans, key=lambda span: span.start))


def _is_flat(trace: Mapping[str, Any]) -> bool:
    """Whether every group that speaks has all ranks in it."""
    info = trace.get("distributedInfo", {})
    sizes = {group["pg_size"] for group in info.get("pg_config", ())}
    return sizes <= {1, info.get("world_size")}


def _align(spans: Mapping[int, tuple[Span, ...]]) -> dict[int, tuple[Span, ...]]:
    first = next(iter(spans.values()))
    aligned = {}
    for rank, own in spans.items():
        offsets = [
            theirs.end - mine.end
            for theirs, mine in zip(first, own, strict=True)
            if mine.name.startswith(_JOINT)
        ]
        aligned[rank] = _shift(own, median(offsets) if offsets else 0.0)
    return aligned


def _shift(spans: Sequence[Span], by: float) -> tuple[Span, ...]:
    return tuple(Span(span.name, span.start + by, span.end + by) for span in spans)


def _meet(spans: Mapping[int, tuple[Span, ...]]) -> tuple[Meeting, ...]:
    meetings = []
    for together in zip(*spans.values(), strict=True):
        arrived = dict(zip(spans, (span.start for span in together), strict=True))
        last = max(arrived, key=lambda rank: arrived[rank])
        waits = {rank: arrived[last] - start for rank, start in arrived.items()}
        meetings.append(Meeting(together[0].name, last, arrived[last], waits))
    return tuple(meetings)
