"""The same bits at every number of workers: parameters, losses, gradient norms, buffers."""

import hashlib
import io
from contextlib import nullcontext
from typing import Any

import pytest

from tests.training.ranks import run_ranks
from training.config import TrainConfig

BATCH = 16
WIDTH = 6


def build_model() -> Any:
    """With all that could depend on the number of workers: dropout, a batch norm, attention."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(WIDTH, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.Unflatten(1, (2, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def part(step: int, virtual: int) -> Any:
    """Samples of a virtual rank."""
    import torch

    generator = torch.Generator().manual_seed(1000 * step + virtual)
    inputs = torch.randn(BATCH // 8, WIDTH, generator=generator)
    return inputs, torch.randint(0, 3, (len(inputs),), generator=generator)


def train(first: int, last: int, state: bytes | None) -> dict[str, Any]:
    """Steps `first` to `last`; what there is after them, with a digest of all of it."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    from training.passes import WholeModel
    from training.reproducible import VirtualRanks
    from training.timing import StepTimer

    torch.manual_seed(5 + dist.get_rank())  # the copies start unequal, and must not stay so
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    if state:
        kept = torch.load(io.BytesIO(state))
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
    ranks = VirtualRanks(model, WholeModel(model, 1, cross_entropy, nullcontext), 8, seed=3)
    if state:
        ranks.load_state_dict(kept["ranks"])
    timer = StepTimer()
    own = range(dist.get_rank() * ranks.num_local, (dist.get_rank() + 1) * ranks.num_local)
    seen = []
    for step in range(first, last + 1):
        for virtual in own:
            inputs, target = part(step, virtual)
            loss = ranks(inputs, target, timer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        ranks.after_step(step)
        seen.append((loss.item(), norm.item()))
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    content = io.BytesIO()
    state_dicts = {"model": model, "optimizer": optimizer, "ranks": ranks}
    torch.save({name: part.state_dict() for name, part in state_dicts.items()}, content)
    return {"digest": digest.hexdigest(), "seen": seen, "state": content.getvalue()}


def test_the_bits_are_those_of_one_worker() -> None:
    [alone] = run_ranks(1, train, 1, 5, None)
    assert len(set(alone["seen"])) == 5
    for world_size in (2, 4, 8):
        for rank in run_ranks(world_size, train, 1, 5, None):
            assert rank["seen"] == alone["seen"], world_size
            assert rank["digest"] == alone["digest"], world_size


def test_a_resume_at_another_size_goes_on_to_the_same_bits() -> None:
    [alone] = run_ranks(1, train, 1, 5, None)
    state = run_ranks(4, train, 1, 2, None)[3]["state"]
    for rank in run_ranks(2, train, 3, 5, state):
        assert rank["seen"] == alone["seen"][2:]
        assert rank["digest"] == alone["digest"]


def against_ddp() -> tuple[list[float], list[float]]:
    """Gradients of one step, ours and DDP's, of a model without chance."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from training.passes import WholeModel
    from training.reproducible import VirtualRanks
    from training.timing import StepTimer

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))
    ranks = VirtualRanks(model, WholeModel(model, 1, cross_entropy, nullcontext), 8, seed=0)
    mine = [part(1, virtual) for virtual in range(dist.get_rank() * 4, dist.get_rank() * 4 + 4)]
    for inputs, target in mine:
        ranks(inputs, target, StepTimer())
    ours = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    inputs, target = (torch.cat(parts) for parts in zip(*mine, strict=True))
    parallel = DistributedDataParallel(model)
    loss: torch.Tensor = cross_entropy(parallel(inputs), target)
    loss.backward()  # type: ignore[no-untyped-call]
    theirs = [p.grad for p in model.parameters() if p.grad is not None]
    return (
        torch.cat([g.flatten() for g in ours]).tolist(),
        torch.cat([g.flatten() for g in theirs]).tolist(),
    )


def test_the_gradient_is_the_mean_that_ddp_computes() -> None:
    for ours, theirs in run_ranks(2, against_ddp):
        assert ours == pytest.approx(theirs, abs=1e-7)
        assert any(ours)


def config(**train: Any) -> TrainConfig:
    base: dict[str, Any] = {"region": "eu", "steps": 1, "global_batch": 32, "reproducible": True}
    return TrainConfig.model_validate(base | train)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"virtual_ranks": 6}, "virtual_ranks 6 must be a power of two"),
        ({"dims": {"dp_replicate": 16}}, "virtual_ranks 8 must be a multiple of the 16 workers"),
        (
            {"global_batch": 36, "dims": {"dp_replicate": 4}},
            "virtual_ranks 8: take 32 or 40",
        ),
        ({"accumulate": 2}, "accumulate 2 and reproducible exclude each other"),
        ({"compile": True}, "compile and reproducible exclude each other"),
        ({"dims": {"dp_shard": 2}}, "reproducible needs whole copies of the model: set dims.dp_sh"),
        ({"dims": {"tp": 2}}, "set dims.tp to 1 .it is 2"),
        ({"synchronize": {"compress": "fp16"}}, "compress fp16 and reproducible exclude each"),
        ({"synchronize": {"mode": "diloco"}}, "mode diloco and reproducible exclude each other"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(change: dict[str, Any], words: str) -> None:
    assert config().virtual_ranks == 8
    with pytest.raises(ValueError, match=words):
        config(**change)
