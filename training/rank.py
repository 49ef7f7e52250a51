"""The life of one rank, in a process that the agent of its node has forked."""

import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

from storage.errors import ConvoyError
from training.errors import NodeDiskFull, PeerLost
from training.hang import stack_path
from training.hot_order import read_order
from training.memory import ADVICE, is_out_of_memory, walk_causes
from training.process import die_with_parent, read_parent, set_name
from training.usercode import write_private

# What gloo says in the ranks that lost a peer: never the cause.
_PEER_LOST = ("Connection closed by peer", "Connection reset", "connectFullMesh", "Broken pipe")


def run_rank(worker: str, spec_file: str) -> None:
    """Call `run()` of the module `worker` with the path of its spec.

    An error is left in a file for the supervisor, who shows the earliest one, and ends the
    process: torchrun is told of its status alone, for what it writes down may quote a record.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent's handler came along with the fork
    die_with_parent(signal.SIGKILL, read_parent())
    order = read_order()
    rank = order.number if order else int(os.environ["RANK"])
    set_name(f"convoy-rank-{rank}")
    path = Path(spec_file)
    # The stacks of a rank that hangs, at a signal, without the interpreter's lock.
    stacks = stack_path(path.parent, rank).open("a")
    faulthandler.register(signal.SIGUSR1, stacks)
    try:
        importlib.import_module(worker).run(path)
    except Exception as error:
        traceback.print_exc()
        leave_failure(error, path.parent, rank)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leave_failure(error: Exception, directory: Path, rank: int, now: float | None = None) -> None:
    """What may be said anywhere, as JSON; beside it the traceback, which may quote a record."""
    failure = {
        "rank": rank,
        "time": time.time() if now is None else now,
        "message": str(error) if isinstance(error, ConvoyError) else _describe(error),
        "peer_lost": _lost_a_peer(error),
        "disk_full": isinstance(error, NodeDiskFull),
    }
    if is_out_of_memory(error):
        failure["message"] = (
            f"out of memory: {failure['message']}. It held {_read_peak_bytes() / 2**20:,.0f} MiB "
            f"at most. What would help: {ADVICE}"
        )
    (directory / f"failure-{rank}.json").write_text(json.dumps(failure))
    if not isinstance(error, ConvoyError) or error.detail is None:
        write_private(detail_file(directory, rank), traceback.format_exc())


def _lost_a_peer(error: Exception) -> bool:
    if isinstance(error, PeerLost):
        return True
    # Also inside the user's code: a sharded model speaks with its peers in there.
    found = (str(one) for one in walk_causes(error) if isinstance(one, RuntimeError))
    return any(sign in text for text in found for sign in _PEER_LOST)


def _read_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _describe(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    # The system's own words for the number; the exception's could be anybody's.
    said = f" ({os.strerror(error.errno)})" if isinstance(error, OSError) and error.errno else ""
    return f"{type(error).__name__}{said} at {Path(frame.filename).name}:{frame.lineno}"


def detail_file(directory: Path, rank: int) -> Path:
    """What a rank's error says, of mode 0600: it may quote a record."""
    return directory / f"failure-{rank}.txt"
