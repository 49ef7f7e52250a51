"""Which rank's error is the cause, when one raises and the others lose it."""

import json
from pathlib import Path

from tests.training.ranks import run_ranks
from training.incidents import find_cause

SECRET = "content-of-a-record"


def _raise_in_rank_1(directory: Path, inside_user_code: bool) -> None:
    """Rank 1 raises and ends; rank 0 loses it in a collective, maybe inside the user's loss()."""
    import torch
    import torch.distributed as dist

    from training.rank import leave_failure
    from training.usercode import UserCode

    rank = dist.get_rank()
    code = UserCode("toy", None, directory / f"failure-{rank}.txt")
    try:
        if rank == 1:
            with code.running("loss()"):
                raise ConnectionResetError(f"Connection reset by peer: {SECRET}")
        if inside_user_code:
            with code.running("loss()"):
                dist.all_reduce(torch.zeros(1))
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        if rank == 1:
            # Its word may be the later one.
            leave_failure(error, directory, rank, now=2e12)
            dist.destroy_process_group()
        else:
            leave_failure(error, directory, rank, now=1e12)


def _cause(directory: Path, inside_user_code: bool) -> str:
    run_ranks(2, _raise_in_rank_1, directory, inside_user_code)
    assert (directory / "failure-0.json").exists()
    cause = find_cause(directory)
    assert cause is not None
    assert cause["rank"] == 1
    return json.dumps(cause)


def test_the_rank_that_raised_and_not_the_one_that_lost_it(tmp_path: Path) -> None:
    assert "toy.loss() raised ConnectionResetError at" in _cause(tmp_path, False)


def test_of_ranks_that_fail_by_the_same_the_first_is_named(tmp_path: Path) -> None:
    def leave(rank: int, message: str, time: float) -> None:
        failure = {"rank": rank, "time": time, "message": message, "peer_lost": False}
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(failure))

    for rank, time in ((0, 3.0), (1, 2.0), (2, 1.0)):
        leave(rank, f"out of memory: it held {rank}1.5 MiB; see failure-{rank}.txt", time)
    cause = find_cause(tmp_path)
    assert cause is not None
    assert cause["rank"] == 0
    leave(0, "another", 3.0)
    cause = find_cause(tmp_path)
    assert cause is not None
    assert cause["rank"] == 1


def test_a_collective_inside_the_users_code(tmp_path: Path) -> None:
    cause = _cause(tmp_path, True)
    assert SECRET not in cause
    assert SECRET in (tmp_path / "failure-1.txt").read_text()
    assert (tmp_path / "failure-1.txt").stat().st_mode & 0o777 == 0o600
