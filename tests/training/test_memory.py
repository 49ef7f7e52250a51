"""What a training needs in memory is counted, and too little is refused with what would fit."""

import types
from pathlib import Path
from typing import Any

import pytest

from training.config import ParallelDims, TrainConfig
from training.errors import MemoryTooSmall, WorkloadError
from training.memory import check_memory, count_oom_kills, is_out_of_memory, read_free_bytes
from training.memory_need import MemoryNeed, count_need, measure_sample_bytes
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


def test_of_layers_that_are_computed_again_the_inputs_are_kept(tmp_path: Path) -> None:
    import torch
    from torch import nn

    layers = [nn.Sequential(nn.Linear(10, 400), nn.Sigmoid(), nn.Linear(400, 10)) for _ in "123"]
    model, inputs = nn.Sequential(*layers), torch.randn(8, 10)
    usual = measure_sample_bytes(make_workload(tmp_path), model, inputs, torch.zeros(8))
    less = measure_sample_bytes(make_workload(tmp_path), model, inputs, torch.zeros(8), layers)
    # The inputs of three layers, and what one of them works on: 400 numbers of the sigmoid's.
    assert 3 * 4 * 400 <= usual <= 3 * 4 * 420 + 100
    assert 4 * 400 <= less <= 4 * (400 + 3 * 10) + 100
    assert torch.equal(model(inputs), nn.Sequential(*layers)(inputs))


@pytest.mark.parametrize(
    ("train", "samples", "activations"),
    [
        ({"accumulate": 5}, 13, 13 * 340),  # of 64
        ({"dims": {"tp": 2, "dp_replicate": 1}}, 64, 64 * (100 + 120)),  # 10 parts of 34 stay whole
        ({"dims": {"tp": 2, "dp_replicate": 1}, "sequence_parallel": True}, 64, 64 * 170),
        # Eight microbatches of 8 samples, and half of the layers.
        ({"dims": {"pp": 2, "dp_replicate": 1}, "pipeline": {"microbatches": 8}}, 16, 16 * 170),
        (
            {
                "dims": {"pp": 2, "dp_replicate": 1},
                "pipeline": {"microbatches": 8, "schedule": "gpipe"},
            },
            64,
            64 * 170,
        ),
        ({"reproducible": True, "dims": {"dp_replicate": 2}}, 8, 8 * 340),
    ],
)
def test_samples_under_way_at_once(train: dict[str, Any], samples: int, activations: int) -> None:
    from torch import nn

    config = make_config(**{"dims": {"dp_replicate": 1}} | train)
    need = count_need([nn.Linear(10, 10)], config, 340)
    assert (need.samples, need.activations) == (samples, activations)


@pytest.mark.parametrize(
    ("train", "gradients", "copies"),
    [
        ({"synchronize": {"mode": "local_sgd"}}, 1, 2 * 3 - 1),
        ({"synchronize": {"mode": "diloco"}}, 1, 2 * 3 - 1 + 3),
        ({"synchronize": {"mode": "diloco", "outer_momentum": 0, "num_fragments": 2}}, 1, 5 + 1.5),
        ({"synchronize": {"mode": "asynchronous"}}, 1, 2 * 3 - 1 + 5),
        ({"synchronize": {"compress": "powersgd"}}, 2, 1),
        ({"reproducible": True}, 4, 0),  # subtrees of 2 and 1, and a leaf
    ],
)
def test_copies_that_keep_workers_together(
    train: dict[str, Any], gradients: int, copies: float
) -> None:
    from torch import nn

    size = 4 * 1000 * 99
    config = make_config(**{"dims": {"dp_replicate": 2}} | train)
    need = count_need([nn.Linear(1000, 99, bias=False)], config, 10)
    assert (need.gradients, need.copies) == (gradients * size, copies * size)
    words = r"optimiser [\d.]+ MiB, copies " if copies else r"optimiser [\d.]+ MiB, activations of "
    with pytest.raises(MemoryTooSmall, match=words):
        check_memory(need, config, 1000, 2)


def test_what_would_fit_in_a_pipeline_and_in_virtual_ranks() -> None:
    pipeline = make_config(dims={"pp": 2, "dp_replicate": 1}, pipeline={"microbatches": 4})
    need = MemoryNeed(MIB, MIB, 0, 320 * MIB, 32)  # two microbatches of 16
    with pytest.raises(MemoryTooSmall, match=r"in train\.pipeline\.microbatches: 8 or more"):
        check_memory(need, pipeline, 170 * MIB, 1)
    virtual = make_config(dims={"dp_replicate": 1}, reproducible=True, virtual_ranks=4)
    need = MemoryNeed(MIB, MIB, 0, 160 * MIB, 16)
    with pytest.raises(MemoryTooSmall, match=r"train\.virtual_ranks: 8\b"):
        check_memory(need, virtual, 90 * MIB, 1)


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
