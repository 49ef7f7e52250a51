"""`convoy simulate`: the training of this workspace, while a scenario happens to its nodes."""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline import workspace
from pipeline.borders import log_refusals
from pipeline.checks import check_network, check_site, open_workload, read_current_manifest
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.machine import hold_nodes
from pipeline.params_file import ParamsFile
from pipeline.progress import report, report_event
from pipeline.scenario_file import apply_scenario, read_scenario, write_scenario
from pipeline.specs import common_fields
from storage.store import open_store
from training.account import Account
from training.checkpoint_commit import remove_stored, store_folder
from training.errors import WorkersFailed
from training.incidents import Incident, Notice
from training.plans import check_plans
from training.scenario import Fault, Scenario
from training.simulation import ANSWERS_FILE, COMMANDS_FILE, Simulation
from training.spec import STEPS_FILE, TrainSpec
from training.supervisor import run_workers

DIRECTORY = workspace.STATE / "simulation"
HAPPENED_FILE = "happened.yaml"
_RUNNING_FILE = "running"
_ANSWER_SECONDS = 15.0


class Simulated(BaseModel, frozen=True, extra="forbid"):
    """What happened in a simulated training, and what it cost."""

    happened: Scenario
    """What was done, and when: a scenario that can be run again."""
    left: tuple[Fault, ...]
    """Faults whose time did not come."""
    incidents: tuple[Incident, ...]
    notices: tuple[Notice, ...]
    steps: int
    """Steps that were made."""
    steps_lost: int
    """Steps that were made again."""
    seconds: float
    seconds_lost: float
    """Between the last step before something and the first one after it."""
    final_loss: float | None
    error: str | None
    """Why the training did not come to its end."""


def simulate(config: Config, root: Path, path: Path | None) -> Simulated:
    """Train as the workspace would, on its nodes, under the scenario of that file; without one,
    under nothing but what `command` orders.

    Works in a directory of its own, which the next one replaces; touches neither artifacts nor
    MLflow. Raises ConfigError for a scenario that does not fit, and what the train stage raises
    before it starts.
    """
    scenario, file = read_scenario(path) if path else (Scenario(), None)
    config = _change(config, scenario, file)
    check_plans(open_workload(config, root), config.train)
    check_network(config)
    manifest = read_current_manifest(config)
    log_refusals(config, lambda: check_site(config, manifest))
    directory = root / DIRECTORY
    shutil.rmtree(directory, ignore_errors=True)
    spec = TrainSpec(
        **common_fields(config, root, "", directory / "run"),
        config=config.train,
        primary=config.evaluate.primary,
        fingerprint="0" * 64,  # of a run that nobody else goes on with
        tracking_uri="",
    )
    with workspace.explain_disk(directory):
        spec.run_directory.mkdir(mode=0o700, parents=True)
        wait_seconds = config.schedule.wait_seconds
        with hold_nodes(spec.nodes, wait_seconds, "simulate"), _announced(directory):
            try:
                return _run(spec, scenario, directory)
            finally:
                _forget_stored(config, spec)


def _change(config: Config, scenario: Scenario, file: ParamsFile | None) -> Config:
    train = apply_scenario(scenario, file, config.train)
    network, checkpoint = train.network, train.checkpoint
    here = all(url.startswith("file:") for url in (config.site.store, config.site.wrapping_key))
    if "network" not in scenario.train and here:
        network = network.model_copy(update={"namespaces": True})
    # A checkpoint on disks of several nodes is whole in the store alone.
    checkpoint = checkpoint.model_copy(update={"store": scenario.disk_mib is not None})
    changes = {"network": network, "checkpoint": checkpoint}
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def _run(spec: TrainSpec, scenario: Scenario, directory: Path) -> Simulated:
    steps = spec.config.steps
    account = Account(lambda event: report_event("simulate", event.message))
    simulation = Simulation(scenario, directory, spec.nodes)
    error = None

    def follow(line: dict[str, float]) -> None:
        report("simulate", int(line["step"]), steps, "steps", f"loss {line['loss']:.4f}")

    report("simulate", 0, steps, "steps", f"starting {spec.num_workers} workers")
    try:
        run_workers(spec, follow, account, simulation)
    except WorkersFailed as failure:
        error = str(failure)
    seconds = account.seconds
    happened = scenario.model_copy(update={"faults": tuple(simulation.happened)})
    write_scenario(directory / HAPPENED_FILE, happened, "What happened: `convoy simulate run` it.")
    lines = _read_lines(spec.run_directory / STEPS_FILE)
    events: list[Incident | Notice] = [*account.incidents, *account.notices]
    return Simulated(
        happened=happened,
        left=simulation.left,
        incidents=account.incidents,
        notices=account.notices,
        steps=account.step,
        steps_lost=sum(incident.steps_lost for incident in account.incidents),
        seconds=seconds,
        seconds_lost=sum(event.seconds_lost for event in events),
        final_loss=lines[-1]["loss"] if lines else None,
        error=error,
    )


def _read_lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _forget_stored(config: Config, spec: TrainSpec) -> None:
    if spec.config.checkpoint.store:
        remove_stored(open_store(config.site), store_folder(spec.run_directory.name))


@contextlib.contextmanager
def _announced(directory: Path) -> Iterator[None]:
    path = directory / _RUNNING_FILE
    path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink()


def command(root: Path, fault: dict[str, Any]) -> str:
    """Have the running simulation do something; what it did, in words.

    Raises PipelineError when none runs, when it cannot, or does not answer.
    """
    directory = root / DIRECTORY
    if not _is_running(directory / _RUNNING_FILE):
        raise PipelineError(
            "no simulation runs in this workspace: start one with `convoy simulate run`"
        )
    name = secrets.token_hex(8)
    with (directory / COMMANDS_FILE).open("a") as file:
        file.write(json.dumps({"id": name, "fault": fault}) + "\n")
    deadline = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < deadline:
        for answer in _read_answers(directory / ANSWERS_FILE):
            if answer["id"] == name:
                if "failed" in answer:
                    raise PipelineError(answer["failed"])
                return answer["done"]
        time.sleep(0.05)
    raise PipelineError(f"the simulation has not answered within {_ANSWER_SECONDS:.0f} s")


def _is_running(path: Path) -> bool:
    try:
        os.kill(int(path.read_text()), 0)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False
    return True


def _read_answers(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
