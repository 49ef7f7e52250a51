"""One replica of a hot world."""

from pathlib import Path


def run(path: Path) -> None:
    """Join those who train, train, leave. `path`: of the TrainSpec."""
    import os

    import torch
    import torch.distributed as dist

    from training.allocator import keep_freed_memory
    from training.config import ParallelDims
    from training.hot_order import read_order
    from training.hot_trainer import train
    from training.parallel import choose_device
    from training.rank import detail_file
    from training.spec import TrainSpec
    from training.workload import load_workload

    order = read_order()
    assert order
    # It is a world of one for all but its peers; those on its node share what the node has.
    os.environ["LOCAL_RANK"] = str(order.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(order.num_local)
    spec = TrainSpec.model_validate_json(path.read_bytes())
    config = spec.config.model_copy(update={"dims": ParallelDims(dp_replicate=1)})
    spec = spec.model_copy(update={"config": config, "life": order.life})
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo" if choose_device().type == "cpu" else "cpu:gloo,cuda:nccl")
    detail = detail_file(spec.run_directory, order.number)
    train(spec, order, load_workload(spec.workload, spec.root, detail))
    # All that this replica read is in the log, or it fails.
    spec.open_log().close()
    dist.destroy_process_group()
