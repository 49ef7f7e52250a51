"""`python -m training.worker SPEC`, started by torchrun: one rank of a training run."""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from storage.errors import ConvoyError
from training.process import die_with_parent
from training.spec import TrainSpec


def run(spec: TrainSpec) -> None:
    """Join the process group, train, leave it."""
    import torch
    import torch.distributed as dist

    from training.tracking import MetricLogger
    from training.trainer import train
    from training.workload import load_workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        workload = load_workload(spec.workload, spec.root)
        if dist.get_rank() == 0:
            with MetricLogger(spec.tracking_uri, spec.mlflow_run_id) as logger:
                train(spec, workload, logger.log)
        else:
            train(spec, workload, lambda line: None)
    finally:
        dist.destroy_process_group()


def main(path: Path) -> None:
    """Run the rank; an error is left in a file for the supervisor, who shows the earliest one."""
    die_with_parent(signal.SIGKILL)
    spec = TrainSpec.model_validate_json(path.read_bytes())
    try:
        run(spec)
    except Exception as error:
        rank = os.environ["RANK"]
        failure = {
            "rank": int(rank),
            "time": time.time(),
            "type": type(error).__name__,
            "message": str(error),
            "known": isinstance(error, ConvoyError),
            "traceback": traceback.format_exc(),
        }
        (path.parent / f"failure-{rank}.json").write_text(json.dumps(failure))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
