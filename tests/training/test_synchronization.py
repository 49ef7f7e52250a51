"""Ways to keep copies together: equal where they must be, equal to each other where theory says."""

import io
from contextlib import nullcontext
from typing import Any

import pytest

from tests.training.ranks import run_ranks
from training.config import TrainConfig
from training.errors import TrainingError

LOCAL = {"mode": "local_sgd", "every_steps": 4}
DILOCO = {"mode": "diloco", "every_steps": 4}
STREAMING = {"mode": "diloco", "every_steps": 4, "num_fragments": 2, "overlap_steps": 1}
POWERSGD = {"compress": "powersgd", "powersgd_start_step": 3, "powersgd_rank": 2}


def configure(synchronize: dict[str, Any], **train: Any) -> TrainConfig:
    base: dict[str, Any] = {"region": "eu", "steps": 1, "global_batch": 48}
    return TrainConfig.model_validate(base | {"synchronize": synchronize} | train)


class Run:
    """A training in one rank."""

    def __init__(self, synchronize: dict[str, Any], optimizer: str) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn

        from training.compression import wrap_copy
        from training.parallel import ParallelModel, build_mesh
        from training.passes import WholeModel
        from training.synchronization import build_synchronizer

        torch.manual_seed(1)
        dims = {"dp_replicate": dist.get_world_size()}
        config = configure(synchronize, dims=dims)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8)
        )
        self.forward = wrap_copy(config, self.model)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(parameters, lr=0.1)
            if optimizer == "sgd"
            else torch.optim.AdamW(parameters, lr=0.01, fused=True)
        )
        mesh = build_mesh(config.dims, torch.device("cpu"))
        through = WholeModel(self.forward, 1, nn.functional.mse_loss, nullcontext)
        model = ParallelModel((self.model,), mesh, through, (self.forward,))
        self.synchronizer = build_synchronizer(config, model, (self.optimizer,))
        self.through = through

    def step(self, step: int) -> None:
        import torch
        import torch.distributed as dist

        from training.timing import StepTimer

        generator = torch.Generator().manual_seed(step)
        every = torch.randn(8, 2, 8, generator=generator)
        mine = every[dist.get_rank() :: dist.get_world_size()].flatten(0, 1)
        self.optimizer.zero_grad()
        self.through(mine, mine.roll(1, 1), StepTimer())
        self.optimizer.step()
        self.synchronizer.after_step(step)

    def save(self) -> bytes:
        import torch

        content = io.BytesIO()
        with self.synchronizer.consolidated():
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "synchronize": self.synchronizer.state_dict(),
            }
            torch.save(state, content)
        return content.getvalue()

    def load(self, content: bytes) -> None:
        import torch

        state = torch.load(io.BytesIO(content), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.synchronizer.load_state_dict(state["synchronize"])

    def numbers(self) -> list[float]:
        # Without buffers: under DDP they are rank 0's, and differ until the next step.
        import torch

        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).tolist()


def train(synchronize: dict[str, Any], optimizer: str, num_steps: int) -> list[list[float]]:
    """Parameters after each step, and after the end."""
    run = Run(synchronize, optimizer)
    seen = []
    for step in range(1, num_steps + 1):
        run.step(step)
        seen.append(run.numbers())
    run.synchronizer.finish()
    return [*seen, run.numbers()]


def save_at(synchronize: dict[str, Any], num_steps: int) -> bytes:
    run = Run(synchronize, "adamw")
    for step in range(1, num_steps + 1):
        run.step(step)
    return run.save()


def resume(
    synchronize: dict[str, Any], states: list[bytes], first: int, num_steps: int
) -> list[list[float]]:
    """As `train`, from a state of this rank, with what there is before its first step in front."""
    import torch.distributed as dist

    run = Run(synchronize, "adamw")
    run.load(states[dist.get_rank()])
    seen = [run.numbers()]
    for step in range(first, num_steps + 1):
        run.step(step)
        seen.append(run.numbers())
    run.synchronizer.finish()
    return [*seen, run.numbers()]


def close(left: list[float], right: list[float]) -> bool:
    return left == pytest.approx(right, abs=1e-6)


def test_local_sgd_in_every_step_is_data_parallelism() -> None:
    local = run_ranks(2, train, {"mode": "local_sgd", "every_steps": 1}, "sgd", 6)[1]
    parallel = run_ranks(2, train, {}, "sgd", 6)[1]
    for step in range(6):
        assert close(local[step], parallel[step])
    assert not close(local[0], local[5])


def test_diloco_without_outer_momentum_at_rate_one_is_local_sgd() -> None:
    plain = DILOCO | {"outer_lr": 1.0, "outer_momentum": 0.0}
    # By SGD: before a batch norm a bias has a gradient of rounding alone, which AdamW makes large.
    diloco = run_ranks(2, train, plain, "sgd", 9)
    local = run_ranks(2, train, LOCAL, "sgd", 9)
    for ours, theirs in zip(diloco, local, strict=True):
        for step in range(10):
            assert close(ours[step], theirs[step]), step


@pytest.mark.parametrize(
    "synchronize", [LOCAL, DILOCO, STREAMING], ids=["local", "diloco", "streaming"]
)
def test_ranks_are_equal_to_the_bit_after_an_average(synchronize: dict[str, Any]) -> None:
    first, *others = run_ranks(3, train, synchronize, "adamw", 9)
    for other in others:
        assert other[8] != first[8]
        assert other[9] == first[9]
        if "num_fragments" not in synchronize:
            assert [other[i] == first[i] for i in range(8)] == 2 * [False, False, False, True]


def test_a_fragment_is_averaged_when_its_turn_comes() -> None:
    at_once = STREAMING | {"overlap_steps": 0}
    first, second = run_ranks(2, train, at_once, "adamw", 8)
    num_front = 8 * 16 + 16
    equal = [
        (first[i][:num_front] == second[i][:num_front], first[i][-100:] == second[i][-100:])
        for i in range(8)
    ]
    neither, front, back = (False, False), (True, False), (False, True)
    assert equal == [neither, back, neither, front, neither, back, neither, front]


@pytest.mark.parametrize(
    ("synchronize", "after"),
    [(LOCAL, 5), (DILOCO, 6), (STREAMING, 6), (POWERSGD, 5), (POWERSGD, 2)],
    ids=["local", "diloco", "streaming-under-way", "powersgd", "powersgd-before"],
)
def test_a_resume_goes_on_to_the_same_bits(synchronize: dict[str, Any], after: int) -> None:
    whole = run_ranks(2, train, synchronize, "adamw", 10)
    states = run_ranks(2, save_at, synchronize, after)
    resumed = run_ranks(2, resume, synchronize, states, after + 1, 10)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours[1:] == theirs[after:]


@pytest.mark.parametrize(
    "synchronize", [LOCAL, DILOCO, STREAMING], ids=["local", "diloco", "streaming"]
)
def test_another_number_of_workers_goes_on_from_the_mean(synchronize: dict[str, Any]) -> None:
    before = run_ranks(2, train, synchronize, "adamw", 6)
    mean = [(a + b) / 2 for a, b in zip(before[0][5], before[1][5], strict=True)]
    states = run_ranks(2, save_at, synchronize, 6)
    resumed = run_ranks(4, resume, synchronize, 4 * states[:1], 7, 10)
    for rank in resumed:
        assert close(rank[0], mean)
        assert rank[0] == resumed[0][0]
        assert rank[-1] == resumed[0][-1]


@pytest.mark.parametrize(
    ("synchronize", "tolerance"),
    [({"compress": "fp16"}, 1e-3), ({"compress": "bf16"}, 1e-2), (POWERSGD, 0.3)],
    ids=["fp16", "bf16", "powersgd"],
)
def test_compressed_gradients_are_near_and_equal_in_all_ranks(
    synchronize: dict[str, Any], tolerance: float
) -> None:
    first, second = run_ranks(2, train, synchronize, "sgd", 6)
    [whole, _] = run_ranks(2, train, {}, "sgd", 6)
    assert first[5] == second[5]
    difference = max(abs(a - b) for a, b in zip(first[5], whole[5], strict=True))
    assert 0 < difference < tolerance


def test_every_parameter_is_in_one_fragment() -> None:
    from torch import nn

    from training.diloco import cut_fragments

    model = nn.Sequential(*(nn.Linear(4, 4 * (i % 3 + 1)) for i in range(7)))
    parameters = dict(model.named_parameters())
    for num_fragments in range(1, 8):
        fragments = cut_fragments(parameters, num_fragments)
        assert len(fragments) == num_fragments
        assert all(fragments)
        assert [name for fragment in fragments for name in fragment] == list(parameters)
    with pytest.raises(TrainingError, match=r"num_fragments is 8 and the model has 7 modules"):
        cut_fragments(parameters, 8)


@pytest.mark.parametrize(
    ("synchronize", "words"),
    [
        (LOCAL | {"compress": "fp16"}, "fp16 is of gradients, and mode local_sgd sends none"),
        (DILOCO | {"num_fragments": 3}, "every_steps 4 must be a multiple of num_fragments 3"),
        (DILOCO | {"overlap_steps": 4}, "overlap_steps 4 must be less than every_steps 4"),
        (POWERSGD | {"powersgd_start_step": 1}, "powersgd_start_step"),
        ({"mode": "gossip"}, "Input should be 'step', 'local_sgd'"),
        (
            {"mode": "asynchronous", "max_staleness": 2},
            "max_staleness 2 is less than the 3 other workers",
        ),
    ],
)
def test_what_does_not_combine_is_refused(synchronize: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configure(synchronize, dims={"dp_replicate": 4})


@pytest.mark.parametrize("synchronize", [LOCAL, DILOCO, {"mode": "asynchronous"}, POWERSGD])
@pytest.mark.parametrize("dim", ["dp_shard", "tp", "pp"])
def test_a_model_that_is_split_is_refused(synchronize: dict[str, Any], dim: str) -> None:
    with pytest.raises(ValueError, match=rf"needs whole copies of the model: set dims\.{dim} to 1"):
        configure(synchronize, dims={dim: 2})


def test_workers_by_themselves_leave_nothing_out() -> None:
    with pytest.raises(ValueError, match=r"on_nonfinite roll_back and synchronize\.mode local"):
        configure(LOCAL, on_nonfinite="roll_back")
