"""Makes Prefect's states true: runs whose process is gone are marked, and go on."""

import threading
from datetime import UTC, datetime, timedelta
from uuid import UUID

import httpx
from prefect import State, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.logging import get_logger
from prefect.states import Cancelled, Completed, Crashed, Running

from flows.automations import SILENT
from flows.lives import CONTINUES, find_successors, read_deployment_runs, read_process

_EVERY_SECONDS = 15.0
_WORKER_ENDS = "Runner is shutting down."
"""What Prefect's runner says with Cancelled as it is ended."""
_UNNAMED = timedelta(seconds=120)
"""In which a run comes to say which process it is."""
_AUTOMATION = timedelta(seconds=20)
"""In which the automation, if it works, submits a crashed run again."""
_IN_FLIGHT = timedelta(seconds=20)
"""In which what a task told last comes to the server."""
_ENDS = {
    StateType.COMPLETED: StateType.COMPLETED,
    StateType.CANCELLED: StateType.CANCELLED,
    StateType.CRASHED: StateType.CRASHED,
    # A task that fails says so before its run does: this one was interrupted.
    StateType.FAILED: StateType.CRASHED,
}
"""How a flow run ended, and how then a task that tells no end."""
_OPEN = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]


def reconcile(flow: str, deployment_id: UUID) -> list[str]:
    """Look at every run once. Gives a line for each that was put right.

    A run is dead whose process was on this machine and is there no more, or that belongs to the
    deployment and never came to name a process. Runs of other machines are left to the automation.
    """
    with get_client(sync_client=True) as client:
        told = [line for run in _read_open(client, flow) if (line := _bury(client, run))]
        begun = [
            run
            for run in read_deployment_runs(client, deployment_id)
            if run.state_type != StateType.SCHEDULED
        ]
        told += [line for run in begun if (line := _revive(client, run) or _restore(client, run))]
        if begun and (line := _submit_again(client, begun[-1])):
            told.append(line)
        _close_tasks(client, flow)
        return told


def _read_open(client: SyncPrefectClient, flow: str) -> list[FlowRun]:
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=_OPEN))
    return client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
        flow_run_filter=FlowRunFilter(state=state),
    )


def _bury(client: SyncPrefectClient, run: FlowRun) -> str:
    process = read_process(run)
    if process is None:
        if run.deployment_id is None or _age(run) < _UNNAMED:
            return ""
        why = "it never came to its first line"
    elif process.is_alive() is not False:
        return ""
    else:
        why = f"its process {process.pid} is gone"
    if run.state_type == StateType.CANCELLING:
        client.set_flow_run_state(run.id, Cancelled(message=f"Cancelled: {why}"))
        return f"{run.name} is Cancelled: {why}"
    # Refused for a run that came to its end meanwhile, which is right.
    client.set_flow_run_state(run.id, Crashed(message=f"The run was found dead: {why}"))
    return f"{run.name} is Crashed: {why}"


def _revive(client: SyncPrefectClient, run: FlowRun) -> str:
    """A server that was away for long takes a run for dead whose heartbeats could not reach it."""
    message = run.state.message if run.state else None
    if run.state_type != StateType.CRASHED or not (message or "").startswith(SILENT):
        return ""
    process = read_process(run)
    if process is None or not process.is_alive():
        return ""
    client.set_flow_run_state(run.id, Running(message="Its process is at work"), force=True)
    return f"{run.name} is Running: its process {process.pid} is at work"


def _restore(client: SyncPrefectClient, run: FlowRun) -> str:
    """A worker that is ended says Cancelled of a run whose process is just ending, also where that
    has said Completed already (Prefect 3.9)."""
    if run.state_type != StateType.CANCELLED or run.state is None:
        return ""
    if run.state.message != _WORKER_ENDS:
        return ""
    if not any(state.is_completed() for state in client.read_flow_run_states(run.id)):
        return ""
    why = "its worker was ended after it"
    client.set_flow_run_state(run.id, Completed(message=f"Completed: {why}"), force=True)
    return f"{run.name} is Completed: {why}"


def _submit_again(client: SyncPrefectClient, run: FlowRun) -> str:
    """What the automation does, in case that the server ended before it came to it."""
    if run.state_type != StateType.CRASHED or _age(run) < _AUTOMATION:
        return ""
    if find_successors(client, run):
        return ""
    assert run.deployment_id is not None
    following = client.create_flow_run_from_deployment(
        run.deployment_id,
        parameters={CONTINUES: str(run.id)},
        idempotency_key=f"{CONTINUES}-{run.id}",
    )
    return f"{following.name} goes on with {run.name}"


def _close_tasks(client: SyncPrefectClient, flow: str) -> None:
    """Give the tasks of ended runs an end too: one that was killed tells none, and what a task told
    while the server was away is lost."""
    ended = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_ENDS)))
    unfinished = TaskRunFilterState(type=TaskRunFilterStateType(any_=_OPEN))
    tasks = client.read_task_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[flow])),
        flow_run_filter=FlowRunFilter(state=ended),
        task_run_filter=TaskRunFilter(state=unfinished),
    )
    for task in tasks:
        assert task.flow_run_id is not None
        run = client.read_flow_run(task.flow_run_id)
        if run.state_type in _ENDS and _age(run) > _IN_FLIGHT:
            end = State(type=_ENDS[run.state_type], message=f"As its flow run {run.name}")
            client.set_task_run_state(task.id, end, force=True)


def _age(run: FlowRun) -> timedelta:
    """Since its last change of state."""
    assert run.state is not None
    return datetime.now(UTC) - run.state.timestamp


def start_reconciling(flow: str, deployment_id: UUID) -> None:
    """Reconcile now and every 15 s, in a thread that ends with this process."""
    logger = get_logger("convoy")
    pause = threading.Event()

    def work() -> None:
        while True:
            try:
                for line in reconcile(flow, deployment_id):
                    logger.warning("%s", line)
            except httpx.HTTPError as error:
                logger.info("the Prefect API is not to be reached (%s)", type(error).__name__)
            except Exception:
                # Without this thread nothing would be put right any more, and nobody would know.
                logger.exception("Prefect's states could not be looked at")
            pause.wait(_EVERY_SECONDS)

    threading.Thread(target=work, name="reconciler", daemon=True).start()
