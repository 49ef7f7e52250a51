"""The served deployment: form, runs by API and by schedule, artifacts, UIs, errors, cancelling."""

import base64
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from pipeline.stages import STAGES
from tests.flows.browser import open_browser
from tests.flows.convoy_up import Up, find_processes, tags
from tests.flows.prefect_api import PrefectApi, wait_until
from tests.workspaces import Workspace

SECRET = "a record that nobody may see"


@pytest.fixture(scope="module")
def scheduled(
    up: Up, completed: str, prefect_server: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrefectApi]:
    """A copy of the workspace, served alone on another Prefect server, every minute."""
    path = tmp_path_factory.mktemp("serve") / "w"
    shutil.copytree(up.workspace.path, path, ignore=shutil.ignore_patterns("prefect", "up.json"))
    workspace = Workspace(path, {**up.workspace.environment, **prefect_server})
    workspace.set("schedule", {"cron": "* * * * *", "timezone": "Europe/Zurich", "retries": 0})
    process = workspace.start("convoy", "serve")
    api = PrefectApi(prefect_server["PREFECT_API_URL"], "toy")
    yield api
    api.close()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert not find_processes(workspace)


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with open_browser() as browser:
        yield browser


def test_status_names_the_servers(up: Up) -> None:
    assert up.workspace.run("convoy", "status").count("http://") == 2


def test_a_second_one_is_refused(up: Up) -> None:
    assert "runs already" in up.workspace.run("convoy", "up", expect=1)


def test_the_form_has_types_and_help(up: Up) -> None:
    assert up.api.deployment["parameters"] == {"workspace": str(up.workspace.path)}
    assert up.api.deployment["schedules"] == []
    properties = up.api.deployment["parameter_openapi_schema"]["properties"]
    assert all(field["description"] for field in properties.values())
    assert properties["steps"]["anyOf"][0] == {"type": "integer", "exclusiveMinimum": 0}
    assert properties["learning_rate"]["anyOf"][0]["type"] == "number"
    assert properties["on_restricted"]["anyOf"][0]["enum"] == ["fail", "exclude"]
    assert properties["force"]["type"] == "boolean"


@pytest.mark.parametrize("steps", [0, "many"])
def test_a_wrong_value_is_refused_before_a_run_exists(up: Up, steps: Any) -> None:
    answer = up.api.ask_for_run(steps=steps)
    assert answer.status_code == 409
    assert "'steps'" in answer.text


def test_what_was_asked_for_is_in_params_and_dvc_is_clean(up: Up, completed: str) -> None:
    assert up.workspace.params["train"]["steps"] == 20
    assert up.workspace.params["train"]["optimizer"]["lr"] == 0.02
    assert "up to date" in up.workspace.run("dvc", "status")


def test_each_stage_is_a_task_with_retries(up: Up, completed: str) -> None:
    tasks = up.api.tasks(completed)
    assert set(tasks) == {"check", *STAGES, "snapshot"}
    for name, task in tasks.items():
        assert task["state_type"] == "COMPLETED"
        assert task["empirical_policy"]["retries"] == (0 if name == "snapshot" else 1)


def test_artifacts_to_look_at(up: Up, completed: str) -> None:
    artifacts = up.api.artifacts(completed)
    assert {"raw-input", "shards", "placement", "training", "metrics", "stages"} <= set(artifacts)
    assert {"train-progress", "mlflow-run", "mlflow-model", "model-version"} <= set(artifacts)
    assert '"CN"' in artifacts["shards"]["data"]
    assert (
        '"region": "eu", "jurisdiction": "US", "sealed shards": 6' in artifacts["placement"]["data"]
    )
    assert "no rule lets shard of CN be in eu" in artifacts["placement"]["data"]
    assert f"{up.mlflow}/#/runs/" in artifacts["mlflow-run"]["data"]


def test_mlflow_has_the_finished_run_and_the_champion(up: Up, completed: str) -> None:
    [run] = [r for r in up.mlflow_runs() if tags(r["data"])["prefect.flow_run_id"] == completed]
    assert run["info"]["status"] == "FINISHED"
    metrics = {metric["key"] for metric in run["data"]["metrics"]}
    assert {"loss", "holdout.accuracy"} <= metrics
    assert tags(run["data"])["convoy.regions_read"] == "eu"
    version = up.ask_mlflow("registered-models/alias", name="toy", alias="champion")
    assert version["model_version"]["run_id"] == run["info"]["run_id"]
    assert tags(version["model_version"])["prefect.flow_run_id"] == completed


def see(browser: WebDriver, url: str, *texts: str) -> str:
    """Open a page, wait until it shows all the texts, and keep a screenshot of it."""
    browser.get(url)
    body = ""

    def shown() -> bool:
        nonlocal body
        body = browser.find_element(By.TAG_NAME, "body").text
        return all(text in body for text in texts)

    try:
        wait_until(shown, 60)
    except AssertionError:
        raise AssertionError(f"{texts} are not all on {url}:\n{body}") from None
    return body


@pytest.fixture
def shots(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where screenshots go: a folder to look at them, when CONVOY_SCREENSHOTS names one."""
    return Path(os.environ.get("CONVOY_SCREENSHOTS", tmp_path))


def test_the_prefect_ui_shows_run_form_and_curve(
    up: Up, completed: str, browser: WebDriver, shots: Path
) -> None:
    page = f"{up.prefect}/runs/flow-run/{completed}"
    see(browser, page, "Completed", "Task runs", "train: 20/20 steps")
    browser.save_screenshot(shots / "flow-run.png")
    page = f"{up.prefect}/deployments/deployment/{up.api.deployment['id']}/run"
    see(browser, page, "steps (Optional)", "Optimiser steps. None: train.steps of params.yaml.")
    browser.save_screenshot(shots / "form.png")
    artifacts = up.api.artifacts(completed)
    page = f"{up.prefect}/artifacts/artifact/{artifacts['training']['id']}"
    see(browser, page, "20 steps on 2 workers", "no rule lets shard of CN be in eu")
    curve = browser.find_element(By.CSS_SELECTOR, "img[alt=loss]")
    wait_until(lambda: curve.get_property("naturalWidth"), 20)
    browser.save_screenshot(shots / "curve.png")
    page = f"{up.prefect}/artifacts/artifact/{artifacts['metrics']['id']}"
    see(browser, page, "records of", "accuracy", "majority")


def test_the_mlflow_ui_shows_run_and_champion(
    up: Up, completed: str, browser: WebDriver, shots: Path
) -> None:
    see(browser, f"{up.mlflow}/#/models/toy", "Version 1", "champion")
    browser.save_screenshot(shots / "model.png")
    [run] = up.mlflow_runs()
    see(browser, f"{up.mlflow}/#/runs/{run['info']['run_id']}", "Finished", "holdout.accuracy")
    browser.save_screenshot(shots / "run.png")


def test_a_store_that_comes_back_is_tried_again(
    up: Up, completed: str, scheduled: PrefectApi
) -> None:
    store = up.workspace.path / ".convoy/stores/us"
    away = store.with_name("us.away")
    up.workspace.set("schedule.retries", 3)  # the first wait is short, and the API tells late
    store.rename(away)
    store.touch()  # where a folder should be
    try:
        run_id = up.api.start()
        wait_until(
            lambda: up.api.tasks(run_id).get("check", {}).get("state_name") == "AwaitingRetry"
        )
    finally:
        store.unlink()
        away.rename(store)
    assert up.api.finish(run_id)["type"] == "COMPLETED"
    assert up.api.tasks(run_id)["check"]["run_count"] >= 2
    wait_until(lambda: "train: up to date" in up.api.logs(run_id))


def test_an_error_is_named_without_the_record_and_not_tried_again(up: Up, completed: str) -> None:
    code = up.workspace.path / "toy_workload.py"
    good = code.read_text()
    bad = good.replace(
        "    return cross_entropy(output, target)", f'    raise ValueError("{SECRET}")'
    )
    assert bad != good
    code.write_text(bad)
    run_id, state = up.api.run()
    code.write_text(good)
    assert state["type"] == "FAILED"
    assert "loss()" in state["message"]
    assert "ValueError" in state["message"]
    told = state["message"] + up.api.logs(run_id) + str(up.api.artifacts(run_id))
    assert SECRET not in told
    assert base64.b64encode(SECRET.encode()).decode() not in told
    assert up.api.tasks(run_id)["train"]["run_count"] == 1
    assert up.mlflow_statuses()[run_id] == "FAILED"


def test_a_second_flow_is_refused_and_a_cancelled_one_leaves_no_process(
    up: Up, completed: str
) -> None:
    run_id = up.api.start(steps=1_000_000)
    wait_until(lambda: re.search(r"train: [1-9][\d,]*/1,000,000 steps", up.api.logs(run_id)))
    refused = up.workspace.run("convoy", "run", expect=1)
    name = up.api.get(f"flow_runs/{run_id}")["name"]
    assert f"in use by flow run {name}, process " in refused
    up.api.cancel(run_id)
    assert up.api.finish(run_id)["type"] == "CANCELLED"
    works = ("training.", "multiprocessing.spawn")
    wait_until(
        lambda: not [p for p in find_processes(up.workspace) if any(work in p for work in works)],
        60,
    )
    assert up.mlflow_statuses()[run_id] == "KILLED"


def test_a_served_flow_runs_by_its_schedule(scheduled: PrefectApi) -> None:
    [schedule] = scheduled.deployment["schedules"]
    assert schedule["schedule"]["cron"] == "* * * * *"
    assert schedule["schedule"]["timezone"] == "Europe/Zurich"
    wait_until(
        lambda: [
            run
            for run in scheduled.runs()
            if run["auto_scheduled"] and run["state_type"] == "COMPLETED"
        ]
    )
