"""A batch of runs at one site: one undisturbed, then each with faults of its own."""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.drive import Drive, Happened
from tests.chaos.plan import STAGES, Fault, draw_faults
from tests.chaos.site import Site, StageLog, open_site
from tests.chaos.verdict import Undisturbed, find_faults, look_before, read_result
from tests.flows.convoy_up import await_nobody
from tests.flows.prefect_api import ENDED

STEPS = 1500
BATCH = 32
TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "global_batch": BATCH,
    "nodes": 2,
    "max_restarts": 60,
    "checkpoint": {"every_steps": 50, "keep": 2},
    "log_every_steps": 10,
    # A node or an agent that is stopped while its ranks end is found by patience alone.
    "recovery": {"patience_seconds": 20.0, "longest_backoff_seconds": 4.0, "exclude_seconds": 1.0},
}
_NOT_RESTORED: dict[str, dict[str, Any]] = {
    "fewer": {"min_nodes": 1, "recovery": {"exclude_seconds": 4.0, "longest_exclude_seconds": 4.0}},
    "hot": {"recovery": {"mode": "hot"}},
}
_EXACT_BUT_FOR_ROUNDING: dict[str, Any] = {
    # Others would draw something else.
    "model": {"hidden": 16, "dropout": 0.0},
    # Adam divides rounding by rounding, for a sample whose gradient has become nothing.
    "optimizer": {"name": "sgd", "lr": 0.5},
}
SAVED_TO_SERVERS = {"checkpoint": {"every_steps": 250, "keep": 2}}
"""To an S3 server, which takes seconds for each."""
_RUN_SECONDS = 1200.0
"""It is a limit for a run that stands still, on a machine that does other things too."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    seed: str
    state: str
    seconds: float
    happened: tuple[Happened, ...]
    missed: tuple[Fault, ...]
    """Faults whose moment did not come."""
    incidents: tuple[str, ...]
    """What the training's own report names."""
    by_hand: bool
    """Whether a budget was used up and `convoy run` went on, as docs/recovery.md says."""
    wrong: tuple[str, ...]


def run_batch(
    seed: int,
    num_runs: int,
    num_faults: tuple[int, int],
    *,
    world: str,
    with_servers: bool,
    only: str,
    tell: Callable[[str], None],
) -> list[Outcome]:
    """So many runs with faults, in a workspace of their own, which stays where one went wrong."""
    home = Path(tempfile.mkdtemp(prefix="convoy-chaos-"))
    outcomes = []
    train = train_in(world) | (SAVED_TO_SERVERS if with_servers else {})
    with open_site(home, train, world=world, with_servers=with_servers) as site:
        wanted, stage_seconds = run_undisturbed(site)
        if not with_servers and not site.has_links:
            tell("no network namespaces can be had here: no link is cut")
        tell("undisturbed: " + ", ".join(f"{k} {v:.1f} s" for k, v in stage_seconds.items()))
        for number in range(num_runs):
            name = "/".join(
                [
                    f"{seed}/{number}",
                    *(["servers"] if with_servers else []),
                    *([world] if world != "restored" else []),
                ]
            )
            faults = draw_faults(
                random.Random(name), *num_faults, STEPS, stage_seconds, site.has, only
            )
            tell(f"run {name}")
            outcomes.append(run_once(site, name, faults, wanted, tell))
            if outcomes[-1].state == "?":  # who knows what is still at work there
                break
        end = site.workspace
    await_nobody(end)
    if any(outcome.wrong for outcome in outcomes):
        tell(f"kept: {home}")
    else:
        shutil.rmtree(home)
    return outcomes


def train_in(world: str) -> dict[str, Any]:
    """The section `train` for one of `WORLDS`."""
    if world == "restored":
        return TRAIN
    more = _NOT_RESTORED[world]
    recovery = TRAIN["recovery"] | more["recovery"]
    return TRAIN | _EXACT_BUT_FOR_ROUNDING | more | {"recovery": recovery}


def run_undisturbed(site: Site) -> tuple[Undisturbed, dict[str, float]]:
    """What a run without faults leaves, and how long each stage takes, in seconds."""
    log, seconds = StageLog(site), dict.fromkeys(STAGES, 0.0)
    run_id = site.api.ask_for_run().json()["id"]
    while (state := site.api.state(run_id))["type"] not in ENDED:
        log.look()
        if log.stage:
            seconds[log.stage] = time.monotonic() - log.since
        time.sleep(0.1)
    assert state["type"] == "COMPLETED", state
    return read_result(site, STEPS * BATCH), seconds


def run_once(
    site: Site,
    seed: str,
    faults: list[Fault],
    wanted: Undisturbed,
    tell: Callable[[str], None],
) -> Outcome:
    """One run, with these faults; all stages are to be done again."""
    before = look_before(site)
    root = site.workspace.path
    shutil.rmtree(root / "artifacts")
    (root / "dvc.lock").unlink()
    began = time.monotonic()
    drive = Drive(site, faults, lambda line: tell(f"  {seed:<12} {line}"))
    by_hand = False
    wrong: list[str] = []
    incidents: tuple[str, ...] = ()
    try:
        state = drive.run(_RUN_SECONDS)
        if state == "FAILED":
            by_hand = True
            tell(f"  {seed:<12} the flow FAILED; `convoy run` goes on")
            site.workspace.run("convoy", "run")
        incidents = _read_incidents(site)
        wrong = find_faults(site, before, wanted, STEPS * BATCH)
    except (AssertionError, OSError) as error:
        state = "?"
        wrong = [f"{type(error).__name__}: {error}"]
    seconds = time.monotonic() - began
    tell(
        f"  {seed:<12} {state} after {seconds:.0f} s; {len(drive.happened)} faults, "
        f"{len(incidents)} incidents of the last life, {len(drive.missed)} moments did not come"
    )
    for line in wrong:
        tell(f"  {seed:<12} WRONG: {line}")
    return Outcome(
        seed,
        state,
        seconds,
        tuple(drive.happened),
        tuple(drive.missed),
        incidents,
        by_hand,
        tuple(wrong),
    )


def _read_incidents(site: Site) -> tuple[str, ...]:
    report = json.loads(site.workspace.read("artifacts/train/report.json"))
    return tuple(f"{each['cause']}: {each['message']}" for each in report["incidents"])
