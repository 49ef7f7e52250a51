"""A sample of the chaos runs: whole flows whose processes die at fixed steps and stages.

`make chaos` draws such runs by a seed: docs/chaos.md.
"""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load, save

from tests.chaos.plan import KINDS, LINKS, SERVERS, Fault, draw_faults
from tests.chaos.runs import BATCH, STEPS, TRAIN, run_once, run_undisturbed
from tests.chaos.site import open_site
from tests.chaos.verdict import TOLERANCE, Undisturbed, check_samples, find_difference
from tests.flows.convoy_up import await_nobody

KIND = {kind.name: kind for kind in KINDS}


def at(step: int, name: str, choice: float = 0.0, **more: float) -> Fault:
    return Fault(KIND[name], "train", step=step, choice=choice, **more)  # type: ignore[arg-type]


def in_stage(stage: str, name: str, **more: float) -> Fault:
    return Fault(KIND[name], stage, **more)  # type: ignore[arg-type]


FAULTS = [
    in_stage("upload", "prefect pause", pause_seconds=1.0),
    at(100, "rank kill"),
    at(200, "agent kill", choice=0.9),
    at(300, "rank stop", choice=0.9),
    at(400, "mlflow kill"),
    at(500, "node kill"),
    at(600, "node cut", choice=0.9, pause_seconds=3.0),
    at(700, "rank kill", choice=0.9, in_save=True),
    at(800, "supervisor kill"),
    at(1000, "supervisor pause", pause_seconds=1.0),
    at(1200, "agent kill", in_save=True),
    at(1350, "machine kill"),
    # A training that is finished and of which DVC does not know is not done again.
    at(STEPS, "flow run kill", at_end=True),
]


@pytest.mark.timeout(1500)  # two whole flows, and servers that start twice
def test_a_run_with_all_of_them_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    told: list[str] = []
    with open_site(tmp_path, TRAIN, with_servers=False) as site:
        wanted, _ = run_undisturbed(site)
        faults = [fault for fault in FAULTS if site.has_links or fault.kind.needs != LINKS]
        outcome = run_once(site, "sample", faults, wanted, told.append)
    assert not outcome.wrong, "\n".join(told)
    assert not outcome.missed, "\n".join(told)
    assert not outcome.by_hand, "\n".join(told)
    assert len(outcome.happened) == len(faults) >= 12
    await_nobody(site.workspace)

    counts = load(wanted.weights)
    counts["seen"][0] += 1
    with pytest.raises(AssertionError):
        check_samples(save(counts), STEPS * BATCH)


def learn(learner: Any, num_steps: int, parts: list[list[int]]) -> Undisturbed:
    """What is left after steps of these samples, cut among some workers."""
    import torch
    from safetensors.torch import save as save_tensors

    from tests.chaos.workload import collate, loss

    optimizer = torch.optim.SGD(learner.parameters(), lr=0.05)  # as of the last steps
    for _ in range(num_steps):
        for part in parts:
            records = [{"number": i, "a": i * 7 % 11 / 11, "b": i * 5 % 13 / 13} for i in part]
            inputs, target = collate(records)
            torch.autograd.backward(loss(learner(inputs), target) * len(part) / BATCH)
        optimizer.step()
        optimizer.zero_grad()
    return Undisturbed(save_tensors(learner.state_dict()), b"step,loss,lr\n1,0.5,0.05\n", b"")


def test_a_sample_that_one_step_missed_is_no_rounding() -> None:
    from tests.chaos.workload import model

    whole = list(range(BATCH))
    learner = model(count=BATCH, dropout=0.0)
    twin = copy.deepcopy(learner)
    learn(learner, 99, [whole])
    before_the_last = copy.deepcopy(learner)
    undisturbed = learn(learner, 1, [whole])
    assert 0 < find_difference(learn(twin, 100, [whole[:16], whole[16:]]), undisturbed) < TOLERANCE
    for missed in whole:
        others = [i for i in whole if i != missed]
        result = learn(copy.deepcopy(before_the_last), 1, [others])
        assert find_difference(result, undisturbed) > TOLERANCE


def test_a_seed_draws_the_same_faults_again() -> None:
    seconds = dict.fromkeys(("ingest", "shard", "upload", "evaluate", "register"), 2.0)
    drawn = [
        draw_faults(random.Random(seed), 5, 5, STEPS, seconds, (SERVERS,))
        for seed in ("1/0", "1/0", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 10
