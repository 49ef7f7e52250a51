"""What all tests share: an environment of their own, and one Prefect server for the flows."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flows.environment import prepare_environment
from flows.services import await_healthy, free_port, running

if TYPE_CHECKING:
    from xdist.scheduler import LoadFileScheduling

# They take minutes, and would keep one of two workers waiting if they came last.
_FIRST = (
    *("test_served", "test_up", "test_lives", "test_chaos", "test_simulation", "test_hot"),
    *("test_equivalence", "test_kill", "test_nodes", "test_outbox", "test_remote_stores"),
    *("test_digits_stages", "test_degrees", "test_starter", "test_registry", "test_fresh_clone"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first."""
    items.sort(
        key=lambda item: _FIRST.index(item.path.stem) if item.path.stem in _FIRST else len(_FIRST)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadFileScheduling":
    """A file's tests all on one worker, and on the same those of both that use one `convoy up`."""
    from xdist.scheduler import LoadFileScheduling

    class ByServers(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).replace("test_up.py", "test_served.py")

    return ByServers(config, log)


@pytest.fixture(scope="session", autouse=True)
def _environment() -> Iterator[None]:
    """Telemetry off, nothing inherited that would point a test at somebody's servers."""
    # Started with SIGINT ignored (`pytest &`), the tests would hand that on to their commands.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = dict(os.environ)
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    prepare_environment(Path("/nonexistent"))
    del os.environ["PREFECT_HOME"]
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_servers_are_left_named(_environment: None) -> Iterator[None]:
    """Fail the test that leaves this process, and so the tests after it, pointed at its servers."""
    before = _named_servers()
    yield
    after = _named_servers()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    assert after == before


@pytest.fixture(autouse=True)
def _no_workspace_stays_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace's module might have the name of one of ours, for the processes of later tests."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def _named_servers() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith(("MLFLOW_", "PREFECT_", "AWS_"))}


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real Prefect server; gives the environment by which commands find it."""
    home = tmp_path_factory.mktemp("prefect")
    url = f"http://127.0.0.1:{free_port(0)}"
    environment = {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"{url}/api"}
    port = url.rsplit(":", 1)[1]
    command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
    with running("prefect", command, home / "server.log", environment) as service:
        await_healthy(service, f"{url}/api/health")
        yield environment
