"""What must be true after a run, whatever went wrong in it."""

import csv
import fcntl
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from flows.environment import is_healthy
from tests.chaos.site import Site
from tests.flows.convoy_up import tags
from tests.flows.prefect_api import wait_until

WEIGHTS = "artifacts/train/model.safetensors"
_SETTLE_SECONDS = 90.0
TOLERANCE = 1e-5
"""Of a parameter and of a loss, where other numbers of workers have added up the same samples."""
_ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


@dataclass(frozen=True)
class Before:
    """What there was before a run."""

    mlflow_runs: frozenset[str]
    versions: frozenset[str]
    flow_runs: frozenset[str]


@dataclass(frozen=True)
class Undisturbed:
    """What a run without faults leaves."""

    weights: bytes
    losses: bytes
    manifest: bytes


def look_before(site: Site) -> Before:
    """What the next run will be compared with."""
    return Before(
        frozenset(run["info"]["run_id"] for run in _mlflow_runs(site)),
        frozenset(_versions(site)),
        frozenset(run["id"] for run in site.api.runs()),
    )


def read_result(site: Site, num_samples: int) -> Undisturbed:
    """What a run has left. Raises AssertionError where samples were left out, or seen twice."""
    if site.world != "hot":  # where a replica counts what it was given itself
        check_samples(site.workspace.read(WEIGHTS), num_samples)
    return Undisturbed(
        site.workspace.read(WEIGHTS),
        site.workspace.read("artifacts/train/loss.csv"),
        site.workspace.read("artifacts/shard/manifest.json"),
    )


def find_faults(site: Site, before: Before, wanted: Undisturbed, num_samples: int) -> list[str]:
    """Everything that is not as it must be, in words; nothing where the run ended as if nothing
    had happened."""
    checks: list[Callable[[], None]] = [
        lambda: _check_result(site, wanted, num_samples),
        lambda: _check_mlflow(site, before),
        lambda: _check_prefect(site, before),
        lambda: _check_dvc(site),
        lambda: _check_log(site),
        lambda: _check_nothing_left(site),
    ]
    found = []
    for check in checks:
        try:
            check()
        except (AssertionError, OSError, KeyError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _check_result(site: Site, wanted: Undisturbed, num_samples: int) -> None:
    result = read_result(site, num_samples)
    assert result.manifest == wanted.manifest, "another manifest"
    if site.world != "restored":
        difference = find_difference(result, wanted)
        assert difference <= TOLERANCE, f"weights or losses differ by {difference:.1e}"
        return
    assert result.losses == wanted.losses, "other losses than undisturbed"
    assert result.weights == wanted.weights, "other weights than undisturbed"


def find_difference(result: Undisturbed, wanted: Undisturbed) -> float:
    """The largest of any parameter or loss. Raises AssertionError for other steps or names."""
    weights, wanted_weights = load(result.weights), load(wanted.weights)
    assert weights.keys() == wanted_weights.keys(), "other parameters than undisturbed"
    learned = [name for name, tensor in weights.items() if tensor.dtype.kind == "f"]
    (steps, losses, _), (wanted_steps, wanted_losses, _) = (
        zip(*csv.reader(one.losses.decode().splitlines()[1:]), strict=True)
        for one in (result, wanted)
    )
    assert steps == wanted_steps, "losses of other steps than undisturbed"
    pairs = [(weights[name], wanted_weights[name]) for name in learned]
    pairs += [(np.array(losses, float), np.array(wanted_losses, float))]
    return max(float(np.abs(one - other).max()) for one, other in pairs)


def check_samples(weights: bytes, num_samples: int) -> None:
    """By the model's own counts, committed steps saw every sample once an epoch. Raises
    AssertionError."""
    seen = load(weights)["seen"]
    given = seen[seen > 0]
    epochs, rest = divmod(num_samples, len(given))
    assert given.sum() == num_samples, f"{given.sum()} samples were seen, not {num_samples}"
    counts = Counter(given.tolist())
    wanted = Counter({epochs: len(given) - rest, epochs + 1: rest})
    assert counts == +wanted, f"samples were seen {dict(counts)} times, not {dict(+wanted)}"


def _mlflow_runs(site: Site) -> list[dict[str, Any]]:
    found = site.up.ask_mlflow("experiments/search", max_results=10)
    ids = [e["experiment_id"] for e in found["experiments"] if e["name"] == "convoy"]
    if not ids:
        return []
    runs = site.up.ask_mlflow("runs/search", experiment_ids=ids, max_results=1000)
    return list(runs.get("runs", []))


def _versions(site: Site) -> dict[str, dict[str, Any]]:
    found = site.up.ask_mlflow("model-versions/search", filter="name = 'toy'", max_results=1000)
    return {version["version"]: version for version in found.get("model_versions", [])}


def _check_mlflow(site: Site, before: Before) -> None:
    # One that was killed in the run's last moment is on its way: `convoy up` starts it again.
    wait_until(lambda: is_healthy(f"{site.up.mlflow}/health"), _SETTLE_SECONDS)
    runs = [run for run in _mlflow_runs(site) if run["info"]["run_id"] not in before.mlflow_runs]
    statuses = Counter(run["info"]["status"] for run in runs)
    assert statuses["FINISHED"] == 1, f"MLflow's new runs are {dict(statuses)}"
    assert statuses["RUNNING"] == 0, f"MLflow's new runs are {dict(statuses)}"
    [finished] = [run for run in runs if run["info"]["status"] == "FINISHED"]
    versions = _versions(site)
    new = [versions[number] for number in versions.keys() - before.versions]
    assert len(new) == 1, f"{len(new)} new model versions"
    assert new[0]["run_id"] == finished["info"]["run_id"], "the version is of another run"
    assert new[0]["status"] == "READY", new[0]["status"]
    registered = site.workspace.read_json("artifacts/register/model_version.json")
    assert str(registered["version"]) == new[0]["version"], "the stage names another version"
    model = site.up.ask_mlflow("registered-models/get", name="toy")["registered_model"]
    aliases = [alias["alias"] for alias in model.get("aliases", [])]
    assert aliases == ["champion"], f"aliases are {aliases}"
    assert "convoy.manifest" in tags(new[0]), "the version has no lineage"
    history = site.up.ask_mlflow(
        "metrics/get-history",
        run_id=finished["info"]["run_id"],
        metric_key="loss",
        max_results=25000,
    )
    lines = site.workspace.read("artifacts/train/steps.jsonl").splitlines()
    logged = sorted(metric["step"] for metric in history["metrics"])
    wanted = [json.loads(line)["step"] for line in lines]
    assert logged == wanted, f"{len(logged)} steps are in MLflow, {len(wanted)} in the log"


def _check_prefect(site: Site, before: Before) -> None:
    def unsettled() -> list[str]:
        runs = [run for run in site.api.runs() if run["id"] not in before.flow_runs]
        open_runs = [
            f"flow run {run['name']} is {run['state_type']}"
            for run in runs
            if run["state_type"] not in _ENDED
        ]
        tasks = [
            f"task {name} of {run['name']} is {task['state_type']}"
            for run in runs
            for name, task in site.api.tasks(run["id"]).items()
            if task["state_type"] not in _ENDED
        ]
        return open_runs + tasks

    try:
        wait_until(lambda: not unsettled(), _SETTLE_SECONDS)
    except AssertionError:
        raise AssertionError(f"Prefect: {'; '.join(unsettled())}") from None


def _check_dvc(site: Site) -> None:
    output = site.workspace.run("dvc", "status")
    assert "up to date" in output, f"dvc status: {output}"
    locks = site.workspace.path / ".dvc/tmp/rwlock"
    content = json.loads(locks.read_text() or "{}") if locks.exists() else {}
    assert not content.get("write"), f"DVC's locks: {content}"


def _check_log(site: Site) -> None:
    audited = json.loads(site.workspace.run("convoy", "audit", "verify", "--json"))
    assert audited["num_proven"] == audited["num_entries"] > 0, audited


def _check_nothing_left(site: Site) -> None:
    root = site.workspace.path
    workers = [process.pid for process in site.find_named("convoy-")]
    assert not workers, f"processes {workers} are left"
    with (root / ".convoy/lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    left = [
        path
        for pattern in ("**/*.tmp", "**/.*.new", "**/.*.old", ".convoy/outbox/*")
        for path in (*root.glob(pattern), *_state(root, pattern))
        if "mlartifacts" not in path.parts and "prefect" not in path.parts
    ]
    left += (root.parent / "tmp").glob("convoy-*")
    assert not left, f"left behind: {sorted(str(path.relative_to(root.parent)) for path in left)}"


def _state(root: Path, pattern: str) -> list[Path]:
    return list((root / ".convoy").glob(pattern)) + list((root / ".dvc").glob(pattern))
