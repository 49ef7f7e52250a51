"""One rank of an evaluation."""

from pathlib import Path


def run(path: Path) -> None:
    """Join the process group, score this rank's batches, leave it. `path`: of the spec."""
    import torch
    import torch.distributed as dist

    from training.rank import detail_file
    from training.scoring import score_part
    from training.spec import EvaluationSpec
    from training.workload import load_workload

    spec = EvaluationSpec.model_validate_json(path.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    detail = detail_file(spec.run_directory, dist.get_rank())
    score_part(spec, load_workload(spec.workload, spec.root, detail))
    # All that this rank read is in the log, or the rank fails.
    spec.open_log().close()
    # After an error the group stays: the others must not lose this rank before its word is left.
    dist.destroy_process_group()
