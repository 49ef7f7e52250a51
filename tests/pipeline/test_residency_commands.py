"""`convoy residency` and `convoy keys` in a workspace: what is said, and with what exit status."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from data.errors import ResidencyError
from flows.arguments import build_parser
from flows.commands import audit, keys, residency
from pipeline.borders import count_crossings
from pipeline.checks import check_artifact_root, read_current_manifest
from pipeline.config import Config
from pipeline.errors import ConfigError, PipelineError, WorkspaceError
from pipeline.stages import STAGES
from storage.access_log import AccessLog
from storage.errors import KeyShredded, ObjectMissing
from tests.workspaces import Workspace

Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *command: str, status: int = 0) -> Any:
    """Run a command in this process; what it printed as JSON, or as text without --json."""
    options = build_parser().parse_args(command)
    module = residency if command[0] == "residency" else keys
    assert module.main(options) == status
    output = capsys.readouterr().out
    return json.loads(output) if "--json" in command else output


def change_rule(work: Workspace, name: str, **changes: Any) -> None:
    params = work.params
    for rule in params["residency"]["rules"]:
        if rule["name"] == name:
            rule |= changes
    work.write_params(params)


def test_every_crossing_is_asked_with_its_rule(work: Workspace, capsys: Capture) -> None:
    found = call(capsys, "residency", "check", "--json")
    assert found["refused"] == 0
    asked = {
        (c["asked_by"], c["jurisdiction"], c["artifact"], c["to_region"]): c
        for c in found["crossings"]
    }
    crossing = asked["upload", "US", "shard", "eu"]
    assert (crossing["from_region"], crossing["leaves_home"]) == ("us", True)
    assert (crossing["allowed"], crossing["rule"], crossing["mechanism"]) == (
        True,
        "us-rule",
        "test",
    )
    assert (crossing["expires"], crossing["num_records"]) == ("2099-12-31", 300)
    assert not asked["train", "CN", "shard", "eu"]["allowed"]
    assert not asked["train", "CN", "shard", "eu"]["needed"]
    assert ("train", "CN", "model", "eu") not in asked
    assert asked["train", "US", "model", "eu"]["allowed"]
    assert found["counts"] == [
        {"year": datetime.now(UTC).year, "jurisdiction": "US", "num_records": 300, "limits": {}}
    ]
    [warning] = found["warnings"]
    assert warning.startswith("raw input of CN was sharded on this machine")
    text = call(capsys, "residency", "check")
    assert "the flow gets all that it needs" in text
    assert "us-rule  test       2099-12-31" in text


def test_what_the_flow_lacks_is_exit_status_1(work: Workspace, capsys: Capture) -> None:
    work.set("residency.on_restricted", "fail")
    text = call(capsys, "residency", "check", status=1)
    assert "refused, and the flow needs it: no rule lets shard of CN be in eu" in text


def test_rules_that_end_soon_and_mlflow_elsewhere(work: Workspace, capsys: Capture) -> None:
    today = datetime.now(UTC).date()
    change_rule(work, "us-rule", expires=str(today + timedelta(30)))
    change_rule(work, "cn-rule", expires=str(today - timedelta(1)))
    work.set("register.region", "us")
    found = call(capsys, "residency", "check", "--json", status=1)
    ends = [w for w in found["warnings"] if "params.yaml:" in w]
    lines = Path("params.yaml").read_text().splitlines()
    assert ends == [
        f"params.yaml:{lines.index('  - name: us-rule') + 1}: rule 'us-rule' expires on "
        f"{today + timedelta(30)}, in 30 days: renew it",
        f"params.yaml:{lines.index('  - name: cn-rule') + 1}: rule 'cn-rule' expired on "
        f"{today - timedelta(1)}: renew it or remove it",
    ]
    refused = {
        (c["asked_by"], c["artifact"], c["to_region"], c["reason"])
        for c in found["crossings"]
        if c["needed"] and not c["allowed"]
    }
    assert ("register", "model", "us", "no rule lets model of EU be in us") in refused
    assert ("register", "metrics", "us", "no rule lets metrics of EU be in us") in refused
    assert any("rule 'cn-rule' expired" in reason for *_, reason in refused)


@pytest.mark.parametrize(
    "uri", ["https://mlflow.example.org", "postgresql://db/mlflow", "http://192.0.2.1:5000"]
)
def test_an_mlflow_elsewhere_wants_a_region(
    work: Workspace, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ResidencyError, match=r"register\.region: MLflow at .* name the region"):
        STAGES["upload"](Config.load())
    *_, entry = AccessLog(work.path / ".convoy/access/log.jsonl").entries()
    assert (entry.action, entry.decision) == ("refuse", "refused")
    work.set("register.region", "us")
    with pytest.raises(ResidencyError, match="metrics of EU may not be in region us"):
        STAGES["upload"](Config.load())
    work.set("register.region", "eu")
    assert Config.load().tracking_region.name == "eu"


def test_a_witness_elsewhere_wants_a_region_that_may_have_the_log(
    work: Workspace, capsys: Capture
) -> None:
    log = AccessLog(work.path / ".convoy/access/log.jsonl")
    checkpoints = work.path / "elsewhere"
    work.set("audit", {"witness": "s3://audit/log?region=eu-west-1"})
    with pytest.raises(ResidencyError, match=r"audit\.region: the witness s3:.* name the region"):
        STAGES["upload"](Config.load())
    *_, entry = log.entries()
    assert (entry.action, entry.decision) == ("refuse", "refused")
    work.set("audit.region", "mars")
    with pytest.raises(ConfigError, match=r"audit\.region: there is no region 'mars'"):
        Config.load()

    work.set("audit.witness", f"file:{checkpoints}")
    work.set("audit.region", "eu")
    with pytest.raises(ResidencyError, match="log of CN may not be in region eu: no rule lets log"):
        STAGES["upload"](Config.load())
    with pytest.raises(ResidencyError, match="log of CN"):
        audit.main(build_parser().parse_args(["audit", "checkpoint"]))
    asked = call(capsys, "residency", "check", "--json", status=1)["crossings"]
    verdicts = {c["jurisdiction"]: c["allowed"] for c in asked if c["asked_by"] == "audit"}
    assert verdicts == {"EU": True, "US": True, "CN": False}
    assert not checkpoints.exists()

    params = work.params
    rule = next(rule for rule in params["residency"]["rules"] if rule["name"] == "cn-rule")
    abroad = rule | {"name": "cn-log", "artifacts": ["log"], "regions": ["eu"]}
    params["residency"]["rules"].append(abroad)
    work.write_params(params)
    STAGES["upload"](Config.load())
    assert list(checkpoints.glob("convoy/*/checkpoints/*"))


def test_an_artifact_root_elsewhere_wants_a_region(work: Workspace) -> None:
    for uri in ("file:///x", "mlflow-artifacts:/1", "/x", "http://localhost:1/x"):
        check_artifact_root(Config.load(), uri)
    with pytest.raises(ResidencyError, match=r"keeps its artifacts in s3://bucket/x"):
        check_artifact_root(Config.load(), "s3://bucket/x")


def test_a_yearly_limit_stops_the_upload_before_its_first_byte(
    work: Workspace, capsys: Capture
) -> None:
    (work.path / ".convoy/crossings.json").unlink()
    change_rule(work, "us-rule", yearly_limit=299)
    before = len(list(AccessLog(work.path / ".convoy/access/log.jsonl").entries()))
    text = call(capsys, "residency", "check", status=1)
    assert "rule 'us-rule' lets 299 records" in text
    with pytest.raises(ResidencyError, match=r"300 of US would have left in .*yearly_limit"):
        STAGES["upload"](Config.load())
    new = list(AccessLog(work.path / ".convoy/access/log.jsonl").entries())[before:]
    assert [entry.action for entry in new] == ["refuse"]
    assert not (work.path / ".convoy/crossings.json").exists()
    change_rule(work, "us-rule", yearly_limit=300)
    config = Config.load()
    for _ in range(2):
        log = AccessLog(work.path / "other.log")
        count_crossings(config, read_current_manifest(config), config.upload_regions, log)
    [entry] = log.entries()
    assert (entry.action, entry.from_region, entry.to_region) == ("cross", "us", "eu")
    assert "left in" in call(capsys, "residency", "check")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (
            {"mechanism": "home", "jurisdictions": ["CN"], "regions": ["us"]},
            r"rules: rule 'more' calls region us home, and that is in US",
        ),
        (
            {"jurisdictions": ["EU"], "regions": ["eu"]},
            r"residency\.rules: 'eu-rule' and 'more' contradict each other",
        ),
    ],
)
def test_a_policy_that_contradicts_itself_is_named(
    work: Workspace, rule: dict[str, Any], words: str
) -> None:
    params = work.params
    params["residency"]["rules"].append(params["residency"]["rules"][0] | {"name": "more"} | rule)
    work.write_params(params)
    with pytest.raises(ConfigError, match=rf"params\.yaml:\d+: .*{words}"):
        Config.load()


def test_an_object_is_explained_by_each_of_its_names(work: Workspace, capsys: Capture) -> None:
    placed = work.read_json("artifacts/upload/eu.json")["placed"]
    shard = next(p for p in placed if p["shard"].startswith("train-US"))
    names = (shard["shard"], shard["digest"][:12], shard["address"], shard["address"][8:20])
    answers = [call(capsys, "residency", "explain", name, "--json") for name in names]
    assert all(answer == answers[0] for answer in answers)
    [found, *_] = answers
    assert found["lies_in"].keys() == {"eu", "us"}
    assert found["lies_in"]["eu"] == shard["address"]
    assert found["forbidden_in"] == ["cn"]
    verdict = next(v for v in found["verdicts"] if v["region"] == "eu")
    assert (verdict["rule"], verdict["evidence"], verdict["lies_there"]) == (
        "us-rule",
        "tests",
        True,
    )
    assert "no rule lets shard of US be in cn" in call(
        capsys, "residency", "explain", shard["shard"]
    )


def test_what_is_made_of_records_is_explained(work: Workspace, capsys: Capture) -> None:
    (work.path / ".convoy/runs/x/checkpoints").mkdir(parents=True)
    for name, artifact in (
        (".convoy/runs/x/checkpoints", "checkpoint"),
        ("models:/toy/3", "model"),
        ("datasets/toy", "raw"),
    ):
        found = call(capsys, "residency", "explain", name, "--json")
        assert found["artifact"] == artifact
        assert found["lies_in"].keys() == {"eu"}
        expected = {"EU", "US", "CN"} if artifact == "raw" else {"EU", "US"}
        assert found["num_records"].keys() == expected
    for name in ("nothing", "params.yaml", "models:/other/1", "ffff" * 16):
        with pytest.raises(WorkspaceError, match="is not known here"):
            call(capsys, "residency", "explain", name)


def test_a_shredded_version_is_said_and_uploaded_again(work: Workspace, capsys: Capture) -> None:
    with pytest.raises(PipelineError, match=r"add --yes\. Nothing was shredded"):
        call(capsys, "keys", "shred", "toy", "eu")
    with pytest.raises(ObjectMissing, match="has no key of dataset 'other'"):
        call(capsys, "keys", "shred", "other", "eu", "--yes")
    with pytest.raises(ConfigError, match="there is no region 'mars'; there are eu, us, cn"):
        call(capsys, "keys", "shred", "toy", "mars", "--yes")
    version = work.read_json("artifacts/upload/eu.json")["version"]
    before = {p["address"] for p in work.read_json("artifacts/upload/eu.json")["placed"]}
    done = call(capsys, "keys", "shred", "toy", "eu", "--version", version[:9], "--yes", "--json")
    assert done == [{"region": "eu", "dataset": "toy", "version": version}]
    with pytest.raises(KeyShredded, match=r"was shredded in region eu by .*convoy stage upload"):
        STAGES["train"](Config.load())
    listed = call(capsys, "keys", "list", "--json")
    assert {row["region"]: bool(row["shredded"]) for row in listed} == {
        "eu": True,
        "us": False,
        "cn": False,
    }
    STAGES["upload"](Config.load())
    after = {p["address"] for p in work.read_json("artifacts/upload/eu.json")["placed"]}
    assert len(after) == len(before)
    assert not after & before
    assert not any(row["shredded"] for row in call(capsys, "keys", "list", "--json"))
    crossings = work.read_json(".convoy/crossings.json")["crossings"]
    assert [c["shredded"] for c in crossings] == [True, False]


def test_shredding_wants_the_name_typed(
    work: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, end = os.openpty()
    with os.fdopen(end) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        os.write(terminal, b"eu\n")
        with pytest.raises(PipelineError, match="that is not its name: nothing was shredded"):
            call(capsys, "keys", "shred", "toy", "eu")
        assert list((work.path / ".convoy/stores/eu/keys").iterdir())
        os.write(terminal, b"toy\n")
        assert "can not be read in region eu any more" in call(capsys, "keys", "shred", "toy", "eu")
    os.close(terminal)
    assert not list((work.path / ".convoy/stores/eu/keys").iterdir())


def test_rotation_takes_all_regions_of_a_key(work: Workspace, capsys: Capture) -> None:
    receipts = {name: work.read(f"artifacts/upload/{name}.json") for name in ("eu", "us")}
    done = call(capsys, "keys", "rotate", "--json")
    assert [envelope["region"] for envelope in done] == ["eu", "us", "cn"]
    assert "1 data keys wrapped anew" in call(capsys, "keys", "rotate", "us")
    STAGES["upload"](Config.load())
    assert receipts == {name: work.read(f"artifacts/upload/{name}.json") for name in receipts}
