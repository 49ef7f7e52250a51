"""The processes that the tests of many ranks run in."""

import os
import time

import pytest

from tests.training.ranks import RankFailed, run_ranks


def _sum(value: int) -> tuple[int, int]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def _fail_in(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"of rank {rank}")
    time.sleep(60)


def _die() -> None:
    os._exit(1)


def test_each_rank_gives_its_result() -> None:
    assert run_ranks(3, _sum, 10) == [(0, 33), (1, 33), (2, 33)]


def test_the_first_error_is_shown() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1:.*ValueError: of rank 1"):
        run_ranks(2, _fail_in, 1)


def test_a_rank_that_dies() -> None:
    with pytest.raises(RankFailed, match="died without a word"):
        run_ranks(2, _die)


def test_a_rank_that_hangs() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\] have not ended"):
        run_ranks(1, time.sleep, 60, timeout_seconds=0.5)
