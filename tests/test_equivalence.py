"""One stage, three callers: plain Python, DVC and Prefect do the same and leave DVC content."""

import pytest

from data.manifest import read_manifest
from tests.workspaces import Workspace, make_workspace

SAME = (
    "artifacts/shard/manifest.json",
    "artifacts/evaluate/metrics.json",
    "artifacts/evaluate/evaluation.json",
    "artifacts/train/model.safetensors",
    "artifacts/train/loss.csv",
)

PLAIN = """
from pipeline.config import Config
from pipeline.stages import STAGES
for stage in STAGES.values():
    stage(Config.load("params.yaml"))
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("plain") / "w")
    workspace.python(PLAIN)
    return workspace


@pytest.fixture(scope="module")
def by_dvc(tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str]) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("dvc") / "w", prefect_server)
    workspace.run("dvc", "repro")
    return workspace


@pytest.fixture(scope="module")
def by_flow(tmp_path_factory: pytest.TempPathFactory, prefect_server: dict[str, str]) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("flow") / "w", prefect_server)
    workspace.run("convoy", "run")
    return workspace


def is_clean(workspace: Workspace) -> bool:
    return "up to date" in workspace.run("dvc", "status")


@pytest.mark.parametrize("name", SAME)
def test_the_three_callers_give_the_same_bytes(
    plain: Workspace, by_dvc: Workspace, by_flow: Workspace, name: str
) -> None:
    assert plain.read(name) == by_dvc.read(name) == by_flow.read(name)


def test_dvc_is_content_after_a_flow(by_flow: Workspace) -> None:
    assert is_clean(by_flow)
    assert "didn't change" in by_flow.run("dvc", "repro")


def test_a_flow_redoes_nothing_after_dvc_repro(by_dvc: Workspace) -> None:
    before = by_dvc.read("dvc.lock")
    assert "ran: nothing" in by_dvc.run("convoy", "run")
    assert by_dvc.read("dvc.lock") == before
    assert is_clean(by_dvc)


def test_a_changed_parameter_redoes_just_what_depends_on_it(by_flow: Workspace) -> None:
    trained = by_flow.read("artifacts/train/model.safetensors")
    output = by_flow.run("convoy", "run", "--set", "register.model_name=other")
    assert "ran: register\n" in output
    assert "other version 1 is the champion" in output
    assert by_flow.read("artifacts/train/model.safetensors") == trained
    output = by_flow.run("convoy", "run", "--set", "train.seed=8")
    assert "ran: train, evaluate, register\n" in output
    assert by_flow.read("artifacts/train/model.safetensors") != trained
    assert is_clean(by_flow)


def test_values_that_are_refused_are_taken_back(by_flow: Workspace) -> None:
    before = by_flow.read("params.yaml")
    said = by_flow.run("convoy", "run", "--set", "train.model.widht=32", expect=1)
    assert "widht" in said
    assert "the values of --set were taken back" in said
    assert by_flow.read("params.yaml") == before


def test_prefect_and_mlflow_are_told_where_the_workspace_is(by_flow: Workspace) -> None:
    said = by_flow.run("convoy", "env").splitlines()
    for name in ("PREFECT_HOME", "PREFECT_API_URL"):
        assert f"export {name}={by_flow.environment[name]}" in said
    assert f"export MLFLOW_TRACKING_URI=sqlite:///{by_flow.path / '.convoy' / 'mlflow.db'}" in said
    assert "export PREFECT_SERVER_ANALYTICS_ENABLED=false" in said


def test_what_git_keeps_is_small_and_holds_no_record(by_flow: Workspace) -> None:
    listed = by_flow.python(
        "import subprocess; print(subprocess.run("
        "['git', 'ls-files', '--others', '--cached', '--exclude-standard'],"
        "capture_output=True, text=True).stdout)"
    ).split()
    assert "artifacts/shard/manifest.json" in listed
    assert "artifacts/upload/eu.json" in listed
    assert "artifacts/evaluate/metrics.json" in listed
    assert not [n for n in listed if n.startswith(("datasets/toy/", ".convoy/"))]
    assert not [n for n in listed if n.endswith((".arrow", ".safetensors", ".key"))]


def test_what_was_not_used_is_said_plainly(by_flow: Workspace) -> None:
    report = by_flow.read_json("artifacts/train/report.json")
    [excluded] = report["excluded"]
    assert excluded["jurisdiction"] == "CN"
    assert excluded["num_records"] > 200
    assert set(report["num_records"]) == {"EU", "US"}
    manifest = read_manifest(by_flow.path / "artifacts/shard/manifest.json")
    assert manifest.count_records("train").total() == excluded["num_records"] + sum(
        report["num_records"].values()
    )


def test_shards_lie_where_they_may_and_nowhere_else(by_flow: Workspace) -> None:
    placed = {
        region: by_flow.read_json(f"artifacts/upload/{region}.json")["placed"]
        for region in ("eu", "us", "cn")
    }
    jurisdictions = {
        region: {name["shard"].split("-")[1] for name in shards}
        for region, shards in placed.items()
    }
    assert jurisdictions == {"eu": {"EU", "US"}, "us": {"US"}, "cn": {"CN"}}
    for region, shards in placed.items():
        stored = {
            str(path.relative_to(by_flow.path / ".convoy/stores" / region))
            for path in (by_flow.path / ".convoy/stores" / region / "objects").iterdir()
        }
        assert stored == {shard["address"] for shard in shards}
