"""The trained weights, gathered from whatever they were spread over."""

from typing import Any

from tests.training.parallel_steps import configure, places
from tests.training.ranks import run_ranks


def _gather(dims: dict[str, int]) -> tuple[int, bool]:
    """In each rank: how many tensors it holds in the end, and whether they are what they were."""
    import torch

    from training.parallel import build_mesh, choose_device, parallelize
    from training.weights import gather_weights

    config = configure(dims=dims)
    workload, mesh = places(), build_mesh(config.dims, choose_device())
    torch.manual_seed(config.seed)
    model = workload.model(config.model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    found = gather_weights(parallelize(workload, model, config, mesh))
    is_same = all(torch.equal(value, expected[name]) for name, value in found.items())
    return len(found), is_same and (len(found) in (0, len(expected)) or dims.get("pp", 1) > 1)


def _count(**dims: Any) -> list[int]:
    ranks = run_ranks(4, _gather, {"dp_replicate": 1} | dims)
    assert all(is_same for _, is_same in ranks)
    return [count for count, _ in ranks]


def test_rank_0_alone_holds_them_all() -> None:
    whole, *others = _count(dp_shard=2, tp=2)
    assert whole > 0
    assert others == [0, 0, 0]
    first, *others = _count(dp_shard=2, pp=2)  # the mesh has the stages outermost
    assert first == whole
    assert others[0] == others[2] == 0 < others[1] < whole
