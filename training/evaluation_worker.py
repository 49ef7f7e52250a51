"""`python -m training.evaluation_worker SPEC`, started by torchrun: one rank of an evaluation."""

import sys
from pathlib import Path

from training.spec import EvaluationSpec
from training.worker import detail_file, main


def run(spec: EvaluationSpec) -> None:
    """Join the process group, score this rank's batches, leave it."""
    import torch
    import torch.distributed as dist

    from training.scoring import score_part
    from training.workload import load_workload

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    detail = detail_file(spec.run_directory, dist.get_rank())
    score_part(spec, load_workload(spec.workload, spec.root, detail))
    # All that this rank read is in the log, or the rank fails.
    spec.open_log().close()
    # After an error the group stays: the others must not lose this rank before its word is left.
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), EvaluationSpec, run)
