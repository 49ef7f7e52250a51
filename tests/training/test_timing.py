"""Phases of a step: they add up, and what backward waits for is communication."""

import time

import pytest

from tests.training.ranks import run_ranks
from training.phases import OTHER, PHASES
from training.timing import StepTimer

_LATE_SECONDS = 0.3


class _Clock:
    """A clock that goes when told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_phases_add_up_to_the_time_that_passed() -> None:
    clock = _Clock()
    timer = StepTimer(clock)
    clock.seconds += 1
    with timer.phase("communication"):
        clock.seconds += 2
        with timer.phase("forward"):
            clock.seconds += 4
        with timer.phase("backward"):
            clock.seconds += 8
        clock.seconds += 16
    taken = timer.take()
    assert tuple(taken) == (*PHASES, OTHER)
    assert [taken[name] for name in ("communication", "forward", "backward")] == [18, 4, 8]
    assert taken[OTHER] == 1
    assert sum(taken.values()) == clock.seconds - 100


def test_a_phase_that_goes_on_is_taken_in_parts() -> None:
    clock = _Clock()
    timer = StepTimer(clock)
    with timer.phase("optimizer"):
        clock.seconds += 1
        first = timer.take()
        clock.seconds += 2
    assert (first["optimizer"], timer.take()["optimizer"]) == (1, 2)


def test_an_error_ends_its_phase() -> None:
    clock = _Clock()
    timer = StepTimer(clock)
    with pytest.raises(ValueError, match="inside"), timer.phase("forward"):
        raise ValueError("inside")
    clock.seconds += 1
    taken = timer.take()
    assert (taken["forward"], taken[OTHER]) == (0, 1)


def _backward_beside_a_late_rank(shards: bool) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    wrapped: nn.Module = model
    if shards:
        fully_shard(model)
    else:
        wrapped = DistributedDataParallel(model)
    timer = StepTimer()
    for _ in range(2):
        timer.take()
        loss = wrapped(torch.ones(4, 8)).sum()
        dist.barrier()
        if dist.get_rank() == 1:
            loss.register_hook(lambda gradient: time.sleep(_LATE_SECONDS))
        timer.watch_backward(loss)
        with timer.phase("backward"):
            loss.backward()
    return timer.take()


@pytest.mark.parametrize("shards", [False, True], ids=["DDP", "FSDP"])
def test_a_rank_waits_for_the_gradients_of_a_late_one(shards: bool) -> None:
    prompt, late = run_ranks(2, _backward_beside_a_late_rank, shards)
    assert prompt["communication"] > _LATE_SECONDS / 2 > late["communication"]
    assert late["backward"] > _LATE_SECONDS
