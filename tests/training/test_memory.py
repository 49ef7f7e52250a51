"""What a training needs in memory is counted, and too little is refused with what would fit."""

import types
from pathlib import Path
from typing import Any

import pytest

from training.config import ParallelDims, TrainConfig
from training.errors import MemoryTooSmall, WorkloadError
from training.memory import (
    MemoryNeed,
    check_memory,
    count_need,
    count_oom_kills,
    is_out_of_memory,
    measure_sample_bytes,
    read_free_bytes,
)
from training.usercode import UserCode
from training.workload import Workload

MIB = 1 << 20


def make_config(**train: Any) -> TrainConfig:
    return TrainConfig.model_validate({"region": "eu", "steps": 1, "global_batch": 64} | train)


def make_workload(directory: Path) -> Workload:
    module = types.ModuleType("toy")
    module.__file__ = "toy.py"
    vars(module).update(loss=lambda output, target: ((output[:, 0] - target) ** 2).mean())
    return Workload(module, directory / "detail.txt")


def test_activations_are_those_of_a_sample_without_the_parameters(tmp_path: Path) -> None:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(100, 50), nn.BatchNorm1d(50), nn.Sigmoid(), nn.Linear(50, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, target = torch.randn(8, 100), torch.zeros(8)
    measured = measure_sample_bytes(make_workload(tmp_path), model, inputs, target)
    # The input, what BatchNorm and Sigmoid work on and give; not 20,000 bytes of weights.
    assert 4 * (100 + 50 + 50) <= measured <= 4 * (100 + 50 + 50) + 400
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [({"name": "adamw"}, 2), ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1)],
)
def test_the_need_of_a_worker(optimizer: dict[str, Any], states: int) -> None:
    from torch import nn

    model = nn.Linear(1000, 99, bias=False)
    config = make_config(optimizer=optimizer, dims={"dp_replicate": 2})
    need = count_need([model], config, 10)
    size = 4 * 1000 * 99
    # Gradients are there twice: as they are, and in the buckets that are averaged.
    assert need == MemoryNeed(size, 2 * size, states * size, 32 * 10, 32)
    alone = count_need([model], make_config(dims={"dp_replicate": 1}), 10)
    assert alone.gradients == size


def test_a_smaller_batch_is_named() -> None:
    need = MemoryNeed(100 * MIB, 100 * MIB, 200 * MIB, 640 * MIB, 64)
    config = make_config(dims={"dp_replicate": 1})
    check_memory(need, config, 940 * MIB, 1)
    with pytest.raises(MemoryTooSmall) as refused:
        check_memory(need, config, 939 * MIB, 1)
    assert "needs about 1.02 GiB" in str(refused.value)
    assert "activations of 64 samples 0.62 GiB" in str(refused.value)
    assert "there is 1.01 GiB for each" in str(refused.value)
    assert "train.global_batch: 63, or the same batch in train.accumulate: 2" in str(refused.value)


def test_workers_of_one_machine_share_its_memory() -> None:
    need = MemoryNeed(100 * MIB, 100 * MIB, 200 * MIB, 640 * MIB, 64)
    config = make_config(global_batch=128, dims={"dp_replicate": 2})
    check_memory(need, config, 1880 * MIB, 2)
    with pytest.raises(MemoryTooSmall, match=r"each of 2 workers.*global_batch: 126"):
        check_memory(need, config, 1879 * MIB, 2)


def test_what_no_batch_makes_fit_is_to_be_sharded() -> None:
    need = MemoryNeed(400 * MIB, 400 * MIB, 800 * MIB, 64 * MIB, 64)
    config = make_config(dims={"dp_replicate": 1})
    with pytest.raises(MemoryTooSmall, match=r"dp_shard: 4\b"):  # 1600 in parts of under 500 - 1
        check_memory(need, config, 100 * MIB, 1)


def test_a_sample_that_does_not_fit() -> None:
    need = MemoryNeed(MIB, MIB, MIB, 640 * MIB, 1)
    with pytest.raises(MemoryTooSmall, match=r"One sample's activations are 0\.62 GiB"):
        check_memory(need, make_config(dims=ParallelDims(dp_replicate=1)), 100 * MIB, 1)


def test_what_there_is() -> None:
    import torch

    assert read_free_bytes(torch.device("cpu")) > MIB


def test_kills_of_the_kernel_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\n")
    assert count_oom_kills(tmp_path / "vmstat") == 3
    assert count_oom_kills(tmp_path / "missing") == 0


def test_an_allocation_that_fails_is_known_inside_the_users_code(tmp_path: Path) -> None:
    import torch

    code = UserCode("toy", None, tmp_path / "detail.txt")
    with pytest.raises(WorkloadError) as failed, code.running("loss()"):
        torch.empty(1 << 50)
    assert is_out_of_memory(failed.value)
    assert not is_out_of_memory(ValueError("can't allocate memory"))
