"""`convoy audit` in a workspace: whole or not, filtered, proven, without Prefect."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flows.arguments import build_parser
from flows.commands import audit
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.recording import recording
from storage.errors import StorageError
from tests.tamper_log import entry
from tests.workspaces import PARAMS, ROOT

LOG = Path(".convoy/access/log.jsonl")


@pytest.fixture
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(yaml.safe_dump(PARAMS))
    with recording(Config.load()) as log:
        for number in range(5):
            log.append(entry(number))
        log.append(entry(5, region="us", actor="ada", run_id="r", object="models:/toy/1"))
        log.append(entry(6, action="refuse", decision="refused", reason="no rule"))


def _audit(*arguments: str) -> int:
    return audit.main(build_parser().parse_args(["audit", *arguments]))


def _show(capsys: pytest.CaptureFixture[str], *options: str) -> list[int]:
    assert _audit("show", "--json", *options) == 0
    return [json.loads(line)["entry"] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("_workspace")
def test_it_is_whole_until_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert _audit("verify") == 0
    said = capsys.readouterr().out
    assert "log.jsonl: 9 entries, none changed" in said
    assert "9 of them are proven by the newest of 1" in said
    LOG.write_bytes(LOG.read_bytes().replace(b'"num_bytes":3', b'"num_bytes":4'))
    assert _audit("verify") == 1
    said = capsys.readouterr().out
    assert "NOT WHOLE  entry 4: it was changed: the checkpoint of 9 entries proves it" in said
    assert _audit("verify", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["findings"][0]["entry"], found["num_entries"]) == (4, 9)


@pytest.mark.usefixtures("_workspace")
def test_show_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert _show(capsys) == list(range(9))
    assert _show(capsys, "--object", "models:") == [6]
    assert _show(capsys, "--region", "us", "--actor", "ada") == [6]
    assert _show(capsys, "--decision", "refused") == [7]
    assert _show(capsys, "--since", "2020-01-01", "--until", "2020-01-02T00:00:00+02:00") == []
    assert _show(capsys, "--since", "2020-01-01", "--region", "eu") == [1, 2, 3, 4, 5, 7]
    assert _audit("show", "--decision", "refused") == 0
    assert "refuse refused eu shard objects/0" in capsys.readouterr().out
    with pytest.raises(PipelineError, match="--since: 'yesterday' is no time"):
        _audit("show", "--since", "yesterday")


@pytest.mark.usefixtures("_workspace")
def test_a_proof_is_checked_by_the_independent_verifier(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _audit("key") == 0
    key = capsys.readouterr().out.strip()
    assert _audit("prove", "6", "--key", key, "--output", "proof.json") == 0
    command = [sys.executable, "-I", str(ROOT / "docs/verify_entry.py"), "proof.json", key]
    proven = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(proven)["object"] == "models:/toy/1"
    assert _audit("prove", "--extends", "9") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "convoy-consistency-proof/1"
    with pytest.raises(PipelineError, match="name an entry by its number"):
        _audit("prove")
    with pytest.raises(PipelineError, match="--key: it is no Ed25519 key"):
        _audit("prove", "1", "--key", "mine")


@pytest.mark.usefixtures("_workspace")
def test_it_loads_neither_prefect_nor_torch() -> None:
    code = """
import sys
from flows.cli import main
assert main(["audit", "verify"]) == 0
assert not {"prefect", "torch", "mlflow", "pyarrow", "boto3"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.usefixtures("_workspace")
def test_a_log_cut_before_a_stage_stops_it() -> None:
    lines = LOG.read_bytes().splitlines(keepends=True)
    LOG.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(StorageError, match="was changed"), recording(Config.load()):
        raise AssertionError("the stage ran")


@pytest.mark.usefixtures("_workspace")
def test_a_rotated_log_is_proven_to_who_has_the_first_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _audit("key") == 0
    first = capsys.readouterr().out.strip()
    keys = [first]
    for _ in range(2):
        assert _audit("rotate") == 0
        keys.append(capsys.readouterr().out.strip())
        with recording(Config.load()) as log:
            log.append(entry(9))
    assert len(set(keys)) == 3
    for key in keys:
        assert _audit("verify", "--key", key) == 0
    assert "21 of them are proven by the newest of" in capsys.readouterr().out
    assert _audit("prove", "6", "--output", "proof.json") == 0
    for key in keys:
        command = [sys.executable, "-I", str(ROOT / "docs/verify_entry.py"), "proof.json", key]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    proof = json.loads(Path("proof.json").read_text())
    Path("proof.json").write_text(json.dumps(proof | {"handovers": proof["handovers"][1:]}))
    command[-1] = first
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
