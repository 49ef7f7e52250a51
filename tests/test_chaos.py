"""A sample of the chaos runs: whole flows whose processes die at fixed steps and stages.

`make chaos` draws such runs by a seed: docs/chaos.md.
"""

import random
from pathlib import Path

import pytest
from safetensors.numpy import load, save

from tests.chaos.plan import KINDS, LINKS, SERVERS, Fault, draw_faults
from tests.chaos.runs import BATCH, STEPS, TRAIN, run_once, run_undisturbed
from tests.chaos.site import open_site
from tests.chaos.verdict import check_samples
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


def test_a_seed_draws_the_same_faults_again() -> None:
    seconds = dict.fromkeys(("ingest", "shard", "upload", "evaluate", "register"), 2.0)
    drawn = [
        draw_faults(random.Random(seed), 5, 5, STEPS, seconds, (SERVERS,))
        for seed in ("1/0", "1/0", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 10
