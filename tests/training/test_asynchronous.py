"""Asynchronous training: nobody waits within the bound, no batch is lost or doubled."""

import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.training.ranks import RankFailed, run_ranks


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_no_step_is_staler_than_the_bound_and_nobody_is_locked_out(
    num_workers: int, seed: int
) -> None:
    import torch

    from training.parameter_server import ParameterServer

    bound = num_workers - 1 + seed
    server = ParameterServer(bound)
    server.open(0, 60, torch.zeros(1))
    taken: list[int] = []
    all_have_begun = threading.Barrier(num_workers, timeout=60)

    def work(worker: int) -> None:
        chance = random.Random(100 * seed + worker)
        turn = server.turn(worker, None)
        all_have_begun.wait()
        while turn.claim is not None:
            taken.append(turn.claim)
            time.sleep(chance.random() * 0.002 * (1 + 3 * worker))
            turn = server.turn(worker, torch.ones(1))

    threads = [threading.Thread(target=work, args=(w,), daemon=True) for w in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken) == list(range(60))
    assert server.turn(0, None).parameters.item() == 60
    assert sum(server.staleness.values()) == 60
    assert max(server.staleness) <= bound
    assert len(server.staleness) > 1


def test_a_fast_worker_waits_at_the_bound_alone() -> None:
    import torch

    from training.parameter_server import ParameterServer

    server = ParameterServer(2)
    server.open(0, 10, torch.zeros(1))
    server.turn(1, None)  # takes parameters, and is slow
    server.turn(0, None)
    assert server.turn(0, torch.ones(1)).claim == 2
    assert server.turn(0, torch.ones(1)).claim == 3
    passed = threading.Event()

    def third() -> None:
        server.turn(0, torch.ones(1))
        passed.set()

    thread = threading.Thread(target=third, daemon=True)
    thread.start()
    assert not passed.wait(0.1)  # a third one would make the slow one's step too stale
    assert server.turn(1, torch.ones(1)).staleness == 2
    assert passed.wait(10)
    thread.join()


def train(slow_seconds: float, num_batches: int, optimizer: str) -> dict[str, Any]:
    """Rank 1 is slow. What this rank did, and what it ends with."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from training.asynchronous import Asynchronous
    from training.replica import Replica

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8))
    parameters = model.parameters()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    inner = kinds[optimizer](parameters, lr=0.01)
    synchronizer = Asynchronous(Replica(model, inner), every_steps=20, max_staleness=3)
    claimed: list[list[int]] = []
    staleness: list[int] = []
    met: list[bytes] = []
    said: list[dict[str, float]] = []
    done = 0
    while done < num_batches:
        claimed.append([])
        for batch in synchronizer.claims(done, num_batches):
            claimed[-1].append(batch)
            generator = torch.Generator().manual_seed(batch)
            inputs = torch.randn(16, 8, generator=generator)
            time.sleep(slow_seconds if dist.get_rank() == 1 else slow_seconds / 10)
            inner.zero_grad()
            (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
            inner.step()
            synchronizer.after_step(batch + 1)
        done = synchronizer.meeting(done, num_batches)
        staleness += synchronizer.staleness
        said.append(synchronizer.describe())
        met.append(b"".join(t.numpy().tobytes() for t in model.state_dict().values()))
    synchronizer.finish()
    return {"claimed": claimed, "staleness": staleness, "met": met, "said": said}


def test_a_slow_worker_holds_nobody_and_all_end_equal() -> None:
    ranks = run_ranks(3, train, 0.03, 50, "adamw")
    assert [rank["met"] == ranks[0]["met"] for rank in ranks] == 3 * [True]
    assert len(set(ranks[0]["met"])) == 3
    for number, whole in enumerate([range(20), range(20, 40), range(40, 50)]):
        taken = Counter(batch for rank in ranks for batch in rank["claimed"][number])
        assert taken == Counter(whole)
    steps = [len(rank["staleness"]) for rank in ranks]
    assert sum(steps) == 50
    assert min(steps[0], steps[2]) > steps[1] > 0
    assert max(max(rank["staleness"]) for rank in ranks) == 3
    assert [line["num_steps"] for line in ranks[0]["said"]] == [20, 20, 10]
    assert max(line["staleness_max"] for line in ranks[0]["said"]) == 3


def test_one_worker_alone_takes_all_in_order() -> None:
    [alone] = run_ranks(1, train, 0.0, 50, "sgd")
    assert alone["staleness"] == 50 * [0]
    assert alone["claimed"] == [list(range(20)), list(range(20, 40)), list(range(40, 50))]


def lose_a_worker() -> None:
    import os

    import torch.distributed as dist
    from torch import nn, optim

    from training.asynchronous import Asynchronous
    from training.replica import Replica

    model = nn.Linear(4, 4)
    replica = Replica(model, optim.SGD(model.parameters(), lr=0.1))
    asynchronous = Asynchronous(replica, every_steps=1000, max_staleness=3)
    for batch in asynchronous.claims(0, 1000):
        time.sleep(0.01)
        if dist.get_rank() == 1 and batch > 5:
            os._exit(1)
        asynchronous.after_step(batch + 1)


def test_a_lost_worker_ends_the_run() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 died|closed by peer|reset by peer"):
        run_ranks(2, lose_a_worker)
