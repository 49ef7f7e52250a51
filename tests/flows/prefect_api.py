"""What tests ask of a Prefect server, by its REST API as any client would."""

import time
from collections.abc import Callable
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

WAIT_SECONDS = 240.0
ENDED = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


def wait_until(condition: Callable[[], Any], seconds: float = WAIT_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


class PrefectApi:
    """A Prefect server with one deployment."""

    def __init__(self, url: str, deployment: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy, no CA of the machine
        # As Prefect's own client does: on a busy machine its database may be locked for a moment.
        again = Retry(5, backoff_factor=1, status_forcelist=(429, 502, 503), allowed_methods=None)
        self._session.mount(url, HTTPAdapter(max_retries=again))
        self.deployment: dict[str, Any] = wait_until(
            lambda: self.get(f"deployments/name/train/{deployment}")
        )

    def close(self) -> None:
        self._session.close()

    def get(self, path: str) -> Any:
        answer = self._session.get(f"{self.url}/{path}", timeout=30)
        return answer.json() if answer.ok else None

    def is_up(self) -> bool:
        try:
            return self._session.get(f"{self.url}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def post(self, path: str, content: dict[str, Any]) -> requests.Response:
        return self._session.post(f"{self.url}/{path}", json=content, timeout=30)

    def patch(self, path: str, content: dict[str, Any]) -> requests.Response:
        return self._session.patch(f"{self.url}/{path}", json=content, timeout=30)

    def ask_for_run(self, **parameters: Any) -> requests.Response:
        return self.post(
            f"deployments/{self.deployment['id']}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )

    def start(self, **parameters: Any) -> str:
        """Ask for a run and wait until it has begun; gives its id."""
        answer = self.ask_for_run(**parameters)
        assert answer.ok, answer.text
        run_id: str = answer.json()["id"]
        wait_until(lambda: self.state(run_id)["type"] in {"RUNNING", *ENDED})
        return run_id

    def finish(self, run_id: str) -> dict[str, Any]:
        """Wait for the end of a run; gives its last state."""
        wait_until(lambda: self.state(run_id)["type"] in ENDED)
        return self.state(run_id)

    def run(self, **parameters: Any) -> tuple[str, dict[str, Any]]:
        run_id = self.start(**parameters)
        return run_id, self.finish(run_id)

    def cancel(self, run_id: str) -> None:
        self.post(f"flow_runs/{run_id}/set_state", {"state": {"type": "CANCELLING"}})

    def state(self, run_id: str) -> dict[str, Any]:
        state: dict[str, Any] = self.get(f"flow_runs/{run_id}")["state"]
        return state

    def runs(self) -> list[dict[str, Any]]:
        deployments = {"deployments": {"id": {"any_": [self.deployment["id"]]}}}
        found: list[dict[str, Any]] = self.post("flow_runs/filter", deployments).json()
        return found

    def tasks(self, run_id: str) -> dict[str, dict[str, Any]]:
        """The task runs of a flow run, by the stage's name."""
        found = self.post("task_runs/filter", {"flow_runs": {"id": {"any_": [run_id]}}}).json()
        return {run["name"].rsplit("-", 1)[0]: run for run in found}

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        """The artifacts of a flow run, by key."""
        found = self.post("artifacts/filter", {"flow_runs": {"id": {"any_": [run_id]}}}).json()
        return {artifact["key"]: artifact for artifact in found if artifact["key"]}

    def logs(self, run_id: str) -> str:
        content = {"logs": {"flow_run_id": {"any_": [run_id]}}}
        return "\n".join(line["message"] for line in self.post("logs/filter", content).json())
