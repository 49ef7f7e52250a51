"""The lives of a flow run: the next run of its deployment goes on with one that crashed.

Prefect retries nothing whose process is gone. So a crashed run is submitted again, by the
automation of `flows.automations` or by the reconciler, as a run whose parameter `continues` names
it. That run counts how often this has happened, and has the first one's parameters.
"""

import contextvars
import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import State, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.context import SyncClientContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled

from pipeline.config import PARAMS_FILE, Config
from pipeline.errors import PipelineError
from pipeline.workspace import STATE
from training.process import ProcessIdentity, identify_process

CONTINUES = "continues"
"""The parameter that names the run to go on with."""
_LABEL = "convoy."
_CANCELLING_SECONDS = 3.0
_UNWIND_SECONDS = 20.0


@dataclass(frozen=True)
class Life:
    """What the present flow run is to do."""

    id: str
    """Of the first flow run that it goes on with, or its own."""
    asked: dict[str, Any]
    """The parameters of that one."""


class ForcedStages:
    """Which stages of a flow run that was told to run all of them have done so, on disk."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._path = root / STATE / "forced.json"
        self._run_id = run_id
        self.done: list[str] = []
        if self._path.exists():
            content = json.loads(self._path.read_bytes())
            self.done = content["done"] if content["run"] == run_id else []

    def add(self, stage: str) -> None:
        """Note that a stage is done."""
        self.done.append(stage)
        pending = self._path.with_suffix(".tmp")
        pending.write_text(json.dumps({"run": self._run_id, "done": self.done}))
        pending.rename(self._path)


def begin_life(root: Path, continues: UUID | None) -> Life | State[Any]:
    """Say in Prefect which process the present flow run is, and look what it goes on with.

    Gives the state to end in when there is nothing to go on with. Raises PipelineError when the run
    before it and its predecessors crashed too often.
    """
    context = SyncClientContext.get()
    run_id = flow_run.get_id()
    assert context
    assert run_id
    client = context.client
    record_process(client, UUID(run_id))
    if continues is None:
        return Life(run_id, {})
    if needless := explain_needless(client, UUID(run_id), continues):
        return Cancelled(message=f"There is nothing to do: {needless}")
    schedule = Config.load(root / PARAMS_FILE).schedule
    first = take_up(client, continues, schedule.max_resubmissions, root)
    asked = {k: v for k, v in first.parameters.items() if k not in ("workspace", CONTINUES)}
    return Life(str(first.id), asked)


def heed_cancelling() -> None:
    """Have the present flow run, which no worker looks after, end when it is to be cancelled.

    A thread asks for the state every three seconds. It ends this process as SIGTERM does, so that
    the stage ends its own and tells MLflow, and says Cancelled once the engine has said its word.
    """
    run_id = flow_run.get_id()
    assert run_id
    context = contextvars.copy_context()  # with the API that the flow uses
    args = (_await_cancelling, UUID(run_id), threading.main_thread())
    threading.Thread(target=context.run, args=args, name="cancelling", daemon=False).start()


def _await_cancelling(run_id: UUID, main: threading.Thread) -> None:
    # This thread is not to be waited for when the API is away.
    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
        get_client(sync_client=True, httpx_settings={"timeout": 5.0}) as client,
    ):
        while True:
            main.join(_CANCELLING_SECONDS)
            if not main.is_alive():
                return
            try:
                state = client.read_flow_run(run_id).state_type
            except httpx.HTTPError:
                continue  # the API is away: nobody can cancel by it
            if state == StateType.CANCELLING:
                break
            if state in TERMINAL_STATES:
                return
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + _UNWIND_SECONDS
        while time.monotonic() < deadline:
            state = client.read_flow_run(run_id).state_type
            if state in TERMINAL_STATES:
                break
            time.sleep(0.2)
        if state == StateType.COMPLETED:
            return  # it had come to its end before
        client.set_flow_run_state(run_id, Cancelled(message="Cancelled as asked for"), force=True)


def record_process(client: SyncPrefectClient, run_id: UUID) -> None:
    """Write into a run's labels which process it is, for whoever finds it dead."""
    identity = asdict(identify_process(os.getpid()))
    client.update_flow_run_labels(run_id, {f"{_LABEL}{k}": v for k, v in identity.items()})


def read_process(run: FlowRun) -> ProcessIdentity | None:
    """Which process a run is; None when it did not come to say so."""
    names = {name: f"{_LABEL}{name}" for name in ProcessIdentity.__dataclass_fields__}
    if not all(label in run.labels for label in names.values()):
        return None
    values: dict[str, Any] = {name: run.labels[label] for name, label in names.items()}
    return ProcessIdentity(**values)


def find_successors(client: SyncPrefectClient, run: FlowRun) -> list[FlowRun]:
    """The runs that were submitted to go on with a run, oldest first."""
    assert run.deployment_id is not None
    found = [
        other
        for other in read_deployment_runs(client, run.deployment_id)
        if other.parameters.get(CONTINUES) == str(run.id)
    ]
    return sorted(found, key=lambda other: (str(other.created), str(other.id)))


def read_deployment_runs(client: SyncPrefectClient, deployment_id: UUID) -> list[FlowRun]:
    """The last 200 runs of a deployment in the order of their starts, expected ones too."""
    only = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment_id]))
    runs = client.read_flow_runs(flow_run_filter=only, sort=FlowRunSort.EXPECTED_START_TIME_DESC)
    return runs[::-1]


def explain_needless(client: SyncPrefectClient, run_id: UUID, continues: UUID) -> str:
    """Why there is nothing for this run to go on with; empty when there is."""
    before = client.read_flow_run(continues)
    if before.state_type is None or before.state_type.value != "CRASHED":
        state = before.state_name or "unknown"
        return f"flow run {before.name} did not crash after all: it is {state}"
    first = find_successors(client, before)[0] if before.deployment_id else None
    if first is not None and first.id != run_id:
        return f"flow run {first.name} goes on with {before.name} already"
    return ""


def take_up(
    client: SyncPrefectClient, continues: UUID, max_resubmissions: int, root: Path
) -> FlowRun:
    """The first of the runs that crashed before the present one. Raises PipelineError, with what
    became of each, when there were too many."""
    crashed = [client.read_flow_run(continues)]
    while earlier := crashed[0].parameters.get(CONTINUES):
        crashed.insert(0, client.read_flow_run(UUID(earlier)))
    if len(crashed) > max_resubmissions:
        listed = "".join(
            f"\n  {run.name}, {run.total_run_time.total_seconds():.0f} s: "
            f"{(run.state.message if run.state else None) or 'no word of it is left'}"
            for run in crashed
        )
        raise PipelineError(
            f"the run crashed {len(crashed)} times, more than params.yaml: "
            f"schedule.max_resubmissions {max_resubmissions} allows, and is not submitted again. "
            "Nothing is lost: mend the cause, then run the deployment again or `convoy run` in "
            f"{root}, which goes on from the last finished stage and checkpoint. In "
            f"order:{listed}"
        )
    return crashed[0]
