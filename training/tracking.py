"""The MLflow run of a training: made before the workers start, ended as it truly ended."""

import contextlib
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel

from storage.errors import ConvoyError
from training.errors import RegistryError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion as MlflowModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION = "champion"
"""The alias of the best registered version."""
METRIC_TAG = "metric."
"""Prefix of the tag that holds a version's primary metric."""

RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]

_ANSWER_SECONDS = 10.0
_SQLITE = "sqlite:///"
_MARK = "convoy.start"


def open_client(tracking_uri: str) -> "MlflowClient":
    """A client of the tracking and registry server. Loads MLflow."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri, tracking_uri)


def is_on_this_machine(uri: str) -> bool:
    """Whether a tracking server, or an artifact root, is a file here or listens on loopback."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        try:
            return ip_address(parts.hostname or "").is_loopback
        except ValueError:
            return parts.hostname == "localhost"
    # Artifacts behind the tracking server are where that is.
    return parts.scheme in ("", "file", "sqlite", "mlflow-artifacts")


def check_tracking(tracking_uri: str, answer_seconds: float = _ANSWER_SECONDS) -> None:
    """Raise RegistryError when no server answers, or when a SQLite file cannot be written: MLflow
    itself would try again for minutes, or for an hour. Loads no MLflow.

    Any answer of a server will do, a refusal of rights included.
    """
    import sqlite3

    import requests

    try:
        if tracking_uri.startswith(("http://", "https://")):
            requests.get(tracking_uri, timeout=answer_seconds, stream=True).close()
        elif tracking_uri.startswith(_SQLITE):
            path = tracking_uri.removeprefix(_SQLITE).partition("?")[0]
            with contextlib.closing(sqlite3.connect(path, timeout=answer_seconds)) as database:
                database.execute("BEGIN IMMEDIATE")
    except (requests.ConnectionError, requests.Timeout) as error:
        raise _unavailable(tracking_uri, f"does not answer ({type(error).__name__})") from None
    except sqlite3.Error as error:
        raise _unavailable(tracking_uri, f"cannot be opened and written ({error})") from None


def await_tracking(tracking_uri: str, seconds: float) -> None:
    """Wait for a server that is away, at most so long. Raises RegistryError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check_tracking(tracking_uri)
        except RegistryError:
            if time.monotonic() > deadline or not tracking_uri.startswith("http"):
                raise
        time.sleep(1.0)


def _unavailable(tracking_uri: str, what: str) -> RegistryError:
    return RegistryError(
        f"MLflow at {tracking_uri} {what}; correct params.yaml: register.tracking_uri "
        "or MLFLOW_TRACKING_URI, or start the server"
    )


def start_run(
    tracking_uri: str,
    experiment: str,
    artifact_location: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    check_root: Callable[[str], None] = lambda root: None,
    mark: str | None = None,
) -> str:
    """Make a run and give its id, once `check_root` found nothing wrong with where the experiment
    keeps its artifacts. Raises RegistryError when MLflow cannot be reached.

    mark: told of no other run. With the same one again the same run is given, also if this was
    killed after it was made.
    """
    check_tracking(tracking_uri)
    try:
        client = open_client(tracking_uri)
        found = client.get_experiment_by_name(experiment)
        if found is None:
            local = tracking_uri.startswith(_SQLITE)
            experiment_id = client.create_experiment(
                experiment, artifact_location=artifact_location if local else None
            )
            found = client.get_experiment(experiment_id)
        experiment_id = found.experiment_id
        check_root(found.artifact_location)
        made = mark and client.search_runs([experiment_id], f"tags.`{_MARK}` = '{mark}'")
        marked = {_MARK: mark} if mark else {}
        run = (
            made[0]
            if made
            else client.create_run(experiment_id, run_name=name, tags=dict(tags) | marked)
        )
        run_id: str = run.info.run_id
        for key, value in params.items():
            client.log_param(run_id, key, value)
    except ConvoyError:
        raise
    except Exception as error:
        raise _unavailable(
            tracking_uri, f"cannot be reached or written ({type(error).__name__}: {error})"
        ) from error
    return run_id


def end_run(tracking_uri: str, run_id: str, status: RunStatus, ended_ms: int | None = None) -> bool:
    """Say how the run ended, and when, or with RUNNING that a killed one goes on; false when MLflow
    has no such run, as after its database was replaced. Raises RegistryError.

    A run that is already said to have ended can go on and is not KILLED afterwards; one that ended
    so keeps its time.
    """
    from mlflow.exceptions import MlflowException

    check_tracking(tracking_uri)
    try:
        client = open_client(tracking_uri)
        present = client.get_run(run_id).info.status
        if present == status or (status == "KILLED" and present != "RUNNING"):
            return True
        if status == "RUNNING":
            client.update_run(run_id, status=status)
        else:
            client.set_terminated(run_id, status, ended_ms)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise _unavailable(
            tracking_uri, f"did not note that the run is {status}: {error}"
        ) from error
    return True


class RunSummary(BaseModel, frozen=True, extra="forbid"):
    """A run, as a list shows it."""

    run_id: str
    name: str
    status: str
    started_seconds: float
    """Since 1970."""
    seconds: float | None
    """None while it runs."""
    metrics: dict[str, float]
    """On held-out records."""


class Champion(BaseModel, frozen=True, extra="forbid"):
    """The model version that bears the alias."""

    name: str
    version: int
    run_id: str | None
    metric: str
    value: float
    manifest: str


def read_runs(tracking_uri: str, experiment: str, limit: int = 10) -> list[RunSummary]:
    """The newest runs of an experiment, newest first; none when there is no such experiment."""
    client = open_client(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    runs = client.search_runs(
        [found.experiment_id], order_by=["attributes.start_time DESC"], max_results=limit
    )
    return [
        RunSummary(
            run_id=run.info.run_id,
            name=run.info.run_name,
            status=run.info.status,
            started_seconds=run.info.start_time / 1000,
            seconds=(run.info.end_time - run.info.start_time) / 1000 if run.info.end_time else None,
            metrics={k: v for k, v in run.data.metrics.items() if k.startswith("holdout.")},
        )
        for run in runs
    ]


def read_champion(tracking_uri: str, name: str) -> Champion | None:
    """The present champion of a registered model, if there is one."""
    found = find_champion(open_client(tracking_uri), name)
    if found is None:
        return None
    metric = next(key for key in found.tags if key.startswith(METRIC_TAG))
    return Champion(
        name=name,
        version=int(found.version),
        run_id=found.run_id,
        metric=metric.removeprefix(METRIC_TAG),
        value=float(found.tags[metric]),
        manifest=found.tags["convoy.manifest"],
    )


def find_champion(client: "MlflowClient", name: str) -> "MlflowModelVersion | None":
    """The model version that bears the alias, if any."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_model_version_by_alias(name, CHAMPION)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise
