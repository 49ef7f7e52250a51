"""What went wrong in a run, classed from what the ranks and the nodes left."""

import json
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from training.memory import ADVICE
from training.spec import rank_steps_file

_FULL_BYTES = 64 << 10
"""Free space on a disk below which the workers cannot leave a word."""
_SIGTERM = int(signal.SIGTERM)

Cause = Literal["error", "memory", "killed", "node_lost", "hang"]


class Incident(BaseModel, frozen=True, extra="forbid"):
    """Something that went wrong in a run."""

    cause: Cause
    """`error`: the code raised, a restart would raise again. `memory`: the kernel ended a process
    for want of memory, and would again. `killed`: a process was ended.
    `node_lost`: a node with all its processes. `hang`: no progress."""
    rank: int | None
    """The first rank that failed, when it is known."""
    node: int | None = None
    message: str
    last_step: int
    """The last step that was begun before."""
    steps_lost: int = 0
    """Steps that were done again."""
    seconds: float
    """From the start of the world to its end."""
    seconds_lost: float = 0.0
    """From the last progress before it to the first step after it."""


NoticeKind = Literal["straggler", "fewer_nodes", "more_nodes", "fault", "not_simulated"]


class Notice(BaseModel, frozen=True, extra="forbid"):
    """Something of a run that is worth knowing and is no failure."""

    kind: NoticeKind
    """`straggler`: a rank is slower than the others. `fewer_nodes`, `more_nodes`: the run goes on
    with another number of them. `fault`: a simulation did something. `not_simulated`: it could
    not."""
    message: str
    rank: int | None = None
    node: int | None = None
    step: int
    """The newest step that was begun."""
    seconds: float
    """Since the run was started."""
    seconds_lost: float = 0.0
    """From the last progress before it to the first step after it, where it ended a world."""


def clear_failures(run_directory: Path) -> None:
    """Forget what an earlier world left."""
    for stale in run_directory.glob("failure-*.json"):
        stale.unlink()


def explain_failure(
    run_directory: Path,
    exit_codes: Mapping[int, int],
    lost_node: int | None,
    starved: bool,
    after_kill: str,
    can_lose: bool = False,
) -> tuple[Cause, int | None, str]:
    """Why a world ended: its cause, the first rank, and words for a user.

    The earliest error that is a rank's own is the root; what the others say is that they lost a
    peer. starved: the kernel has ended a process for want of memory meanwhile. can_lose: there are
    nodes enough to do without one whose disk is full, where not all are.
    """
    full = _find_full_disk(run_directory) if can_lose else None
    if full is not None:
        return "node_lost", full["rank"], f"the disk of the node of rank {full['rank']} is full"
    first = find_cause(run_directory)
    if first is not None:
        return "error", first["rank"], f"rank {first['rank']} failed: {first['message']}"
    if shutil.disk_usage(run_directory).free < _FULL_BYTES:
        return "error", None, f"the disk of {run_directory} is full: make room; {after_kill}"
    if lost_node is not None:
        return "node_lost", None, f"node {lost_node} was lost"
    # Those that lost a peer are ended by torchrun with SIGTERM, or by gloo's error.
    killed = sorted(rank for rank, code in exit_codes.items() if code < 0 and -code != _SIGTERM)
    if killed:
        code = exit_codes[killed[0]]
        who = f"rank {killed[0]} was ended by {signal.Signals(-code).name}"
        if starved and code == -signal.SIGKILL:
            return "memory", killed[0], f"{who}, {_explain_starved(run_directory)}. {after_kill}"
        return "killed", killed[0], who
    return "killed", None, "the workers ended"


def find_cause(directory: Path) -> dict[str, Any] | None:
    """What the first rank left that failed by itself, and not because it lost another one; of those
    that failed by the same, the one of the lowest number."""
    found = filter(None, (_read_json(path) for path in directory.glob("failure-*.json")))
    own = sorted((f for f in found if not f["peer_lost"]), key=lambda f: float(f["time"]))
    same = (f for f in own if _drop_numbers(f["message"]) == _drop_numbers(own[0]["message"]))
    return min(same, key=lambda failure: int(failure["rank"]), default=None)


def _drop_numbers(message: str) -> str:
    """Ranks have files and sizes of their own in what is otherwise the same message."""
    return re.sub(r"[\d.,]+", "", message)


def _find_full_disk(directory: Path) -> dict[str, Any] | None:
    """What a rank left that found its node's disk full, and not that of all nodes."""
    found = filter(None, (_read_json(path) for path in sorted(directory.glob("failure-*.json"))))
    return next((failure for failure in found if failure["disk_full"]), None)


def _read_peak_bytes(directory: Path) -> list[float]:
    """The memory that each rank's step log says it held at most."""
    peaks = []
    for path in directory.glob(rank_steps_file("*")):
        if lines := path.read_bytes().splitlines():
            peaks.append(json.loads(lines[-1])["peak_rss_bytes"])
    return peaks


def _explain_starved(run_directory: Path) -> str:
    peaks = _read_peak_bytes(run_directory)
    held = f"; the workers held up to {max(peaks) / 2**20:,.0f} MiB each" if peaks else ""
    return f"because the machine ran out of memory{held}. What would help: {ADVICE}"


def _read_json(path: Path) -> dict[str, Any] | None:
    """What a process left; None when it left nothing, or a full disk took nothing."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content
