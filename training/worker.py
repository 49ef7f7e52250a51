"""`python -m training.worker SPEC`, started by torchrun: one rank of a training run."""

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from storage.errors import ConvoyError
from training.memory import ADVICE, is_out_of_memory, walk_causes
from training.process import die_with_parent, read_parent
from training.spec import TrainSpec, WorkerSpec
from training.usercode import write_private

Spec = TypeVar("Spec", bound=WorkerSpec)

# What gloo says in the ranks that lost a peer: never the cause.
_PEER_LOST = ("Connection closed by peer", "Connection reset", "connectFullMesh", "Broken pipe")


def run(spec: TrainSpec) -> None:
    """Join the process group, train, leave it."""
    import torch
    import torch.distributed as dist

    from training.parallel import choose_device
    from training.tracking import MetricLogger
    from training.trainer import train
    from training.workload import load_workload

    torch.set_num_threads(1)
    # What is not a tensor of the model is exchanged on the CPU also where GPUs train.
    dist.init_process_group("gloo" if choose_device().type == "cpu" else "cpu:gloo,cuda:nccl")
    detail = detail_file(spec.run_directory, dist.get_rank())
    workload = load_workload(spec.workload, spec.root, detail)
    if dist.get_rank() == 0:
        with MetricLogger(spec.tracking_uri, spec.mlflow_run_id) as logger:
            train(spec, workload, logger.log)
    else:
        train(spec, workload, lambda line: None)
    # All that this rank read is in the log, or the rank fails.
    spec.open_log().close()
    # After an error the group stays: the others must not lose this rank before its word is left.
    dist.destroy_process_group()


def main(path: Path, kind: type[Spec], run: Callable[[Spec], None]) -> None:
    """Run the rank; an error is left in a file for the supervisor, who shows the earliest one."""
    die_with_parent(signal.SIGKILL, read_parent())
    spec = kind.model_validate_json(path.read_bytes())
    try:
        run(spec)
    except Exception as error:
        leave_failure(error, path.parent, int(os.environ["RANK"]))
        raise


def leave_failure(error: Exception, directory: Path, rank: int, now: float | None = None) -> None:
    """What may be said anywhere, as JSON; beside it the traceback, which may quote a record."""
    failure = {
        "rank": rank,
        "time": time.time() if now is None else now,
        "message": str(error) if isinstance(error, ConvoyError) else _describe(error),
        "peer_lost": _lost_a_peer(error),
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), TrainSpec, run)
