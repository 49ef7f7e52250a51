"""One workspace with its `convoy up` for most tests of the flows."""

import signal
from collections.abc import Iterator

import pytest

from tests.flows.convoy_up import Up, read_urls, start_up
from tests.flows.pacing import make_paced
from tests.flows.prefect_api import PrefectApi
from tests.workspaces import make_workspace


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    path = tmp_path_factory.mktemp("up") / "w"
    workspace = make_workspace(path, schedule={"cron": None, "retries": 1})
    make_paced(workspace)
    process = start_up(workspace)
    try:
        prefect, mlflow = read_urls(process)
        api = PrefectApi(f"{prefect}/api", "toy")
        yield Up(workspace, process, api, prefect, mlflow)
        api.close()
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@pytest.fixture(scope="session")
def completed(up: Up) -> str:
    """The id of a flow run that the API was asked for, with parameters, and that completed."""
    run_id, state = up.api.run(steps=20, learning_rate=0.02)
    assert state["type"] == "COMPLETED", state
    return run_id
