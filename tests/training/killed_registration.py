"""`python -m tests.training.killed_registration FOLDER`: registrations that kill themselves.

At each of MLflow's own writes, once before and once after it, a process is killed by SIGKILL, and
the registration called again by another. Run in a process of its own, which is forked for each: it
must not have opened a database.
"""

import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore as Registry
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as Tracking
from mlflow.utils import requirements_utils

from tests.training.test_registry import Place, make_place
from training.tracking import start_run

WRITES: list[tuple[type, str]] = [
    (Tracking, "create_logged_model"),
    (Tracking, "log_outputs"),
    (LocalArtifactRepository, "log_artifacts"),
    (Tracking, "finalize_logged_model"),
    (Registry, "create_registered_model"),
    (Registry, "create_model_version"),
    (Registry, "set_registered_model_alias"),
]

USED_LATE = (
    "git",
    "mlflow.models.display_utils",
    "mlflow.pyfunc.scoring_server",
    "mlflow.pyfunc.utils.environment",
    "mlflow.store.model_registry.sqlalchemy_workspace_store",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "mlflow.tracing.export.utils",
    "mlflow.tracing.processor.otel",
    "mlflow.utils.search_logged_model_utils",
)
"""What MLflow imports when a model is registered: before the forks once, not in each of them."""


def die_at(owner: type, name: str, after: bool) -> None:
    write: Callable[..., Any] = getattr(owner, name)

    def killed(*arguments: Any, **named: Any) -> Any:
        if after:
            write(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, killed)


def register_and_die(register: Callable[[], Any], owner: type, name: str, after: bool) -> None:
    die_at(owner, name, after)
    register()


def in_child(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for name in USED_LATE:
        importlib.import_module(name)
    # It reads every package that is installed.
    requirements_utils._init_packages_to_modules_map()  # type: ignore[no-untyped-call]
    uri = f"sqlite:///{folder}/mlflow.db"
    run = folder / "run"

    def begin() -> None:
        location = (folder / "artifacts").as_uri()
        run.write_text(start_run(uri, "convoy", location, "toy-1", {}, {}))

    assert in_child(begin) == 0
    place = make_place(folder, uri, run.read_text())
    assert mlflow.pyfunc
    number = 0
    for owner, name in WRITES:
        for after in (False, True):
            number += 1
            model = f"{name}-{'after' if after else 'before'}".replace("_", "-")

            register = partial(Place(folder, uri, place.run_id, number).register, name=model)
            died = in_child(partial(register_and_die, register, owner, name, after))
            assert died == -signal.SIGKILL, model
            assert in_child(register) == 0, model
    print(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
