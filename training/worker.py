"""One rank of a training run."""

from pathlib import Path


def run(path: Path) -> None:
    """Join the process group, train, leave it. `path`: of the TrainSpec."""
    import torch
    import torch.distributed as dist

    from training.allocator import keep_freed_memory
    from training.parallel import choose_device
    from training.rank import detail_file
    from training.spec import TrainSpec
    from training.trainer import train
    from training.workload import load_workload

    spec = TrainSpec.model_validate_json(path.read_bytes())
    torch.set_num_threads(1)
    keep_freed_memory()
    # What is not a tensor of the model is exchanged on the CPU also where GPUs train.
    dist.init_process_group("gloo" if choose_device().type == "cpu" else "cpu:gloo,cuda:nccl")
    detail = detail_file(spec.run_directory, dist.get_rank())
    train(spec, load_workload(spec.workload, spec.root, detail))
    # All that this rank read is in the log, or the rank fails.
    spec.open_log().close()
    # After an error the group stays: the others must not lose this rank before its word is left.
    dist.destroy_process_group()
