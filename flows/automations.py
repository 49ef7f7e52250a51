"""The automations that Prefect runs for a deployment: silent runs are Crashed, and go on.

They work as long as the Prefect server does, whatever became of the machine of the run.
"""

from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.lives import CONTINUES

SILENT = "No heartbeat"
"""How the message begins of a run that was taken for dead because nothing was heard of it."""
_PREFIX = "prefect.flow-run."
_HEARTBEAT = f"{_PREFIX}heartbeat"
_ENDS = {f"{_PREFIX}{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled")}


def install_automations(
    client: SyncPrefectClient, deployment_id: UUID, dataset: str, silence_seconds: float
) -> None:
    """Have exactly these automations for a deployment, whatever there was of them before."""
    for wanted in (
        _crash_the_silent(deployment_id, dataset, silence_seconds),
        _submit_again(deployment_id, dataset),
    ):
        present = client.read_automations_by_name(wanted.name)
        for surplus in present[1:]:
            client.delete_automation(surplus.id)
        if not present:
            client.create_automation(wanted)
        elif _plain(present[0]) != _plain(wanted):
            # It forgets which runs it waits for: not without need.
            client.update_automation(present[0].id, wanted)


def _plain(automation: AutomationCore) -> dict[str, Any]:
    """What makes it what it is, in a form to compare."""
    fields = {"description", "enabled", "trigger", "actions"}
    content = automation.model_dump(mode="json", include=fields)
    for key in ("expect", "after", "for_each"):
        content["trigger"][key] = sorted(content["trigger"][key])
    return content


def _crash_the_silent(deployment_id: UUID, dataset: str, silence_seconds: float) -> AutomationCore:
    return AutomationCore(
        name=f"convoy {dataset}: a run that is silent has crashed",
        description=f"Its heartbeats stayed away for {silence_seconds:.0f} s: its machine is gone.",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            # After a heartbeat alone it would miss a run that died before its first.
            after={_HEARTBEAT, f"{_PREFIX}Running"},
            expect={_HEARTBEAT, *_ENDS},
            match=ResourceSpecification({"prefect.resource.id": [f"{_PREFIX}*"]}),
            match_related=_of(deployment_id),
            for_each={"prefect.resource.id"},
            threshold=1,
            within=timedelta(seconds=silence_seconds),
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name="Crashed",
                force=False,
                message=f"{SILENT} for {silence_seconds:.0f} s: its machine is gone",
            )
        ],
    )


def _submit_again(deployment_id: UUID, dataset: str) -> AutomationCore:
    return AutomationCore(
        name=f"convoy {dataset}: a run that crashed goes on",
        description="Another run of the deployment goes on from its last stage and checkpoint, at "
        "most schedule.max_resubmissions times.",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={f"{_PREFIX}Crashed"},
            match=ResourceSpecification({"prefect.resource.id": [f"{_PREFIX}*"]}),
            match_related=_of(deployment_id),
            for_each={"prefect.resource.id"},
            threshold=1,
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment_id,
                job_variables=None,
                parameters={
                    CONTINUES: {"__prefect_kind": "jinja", "template": "{{ flow_run.id }}"}
                },
            )
        ],
    )


def _of(deployment_id: UUID) -> ResourceSpecification:
    return ResourceSpecification(
        {
            "prefect.resource.role": ["deployment"],
            "prefect.resource.id": [f"prefect.deployment.{deployment_id}"],
        }
    )
