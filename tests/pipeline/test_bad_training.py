"""What goes wrong under torchrun, in evaluation and in registration, by the stages themselves."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from data.manifest import read_manifest
from pipeline import workspace
from pipeline.checks import check_network, check_site
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.lineage import digest_training
from pipeline.stages import STAGES, TrainReport
from storage.errors import ConvoyError
from tests.pipeline.conftest import contents, edit, forget_workload, refuse
from tests.workspaces import Workspace
from training.errors import RegistryError, WorkersFailed
from training.outbox import deliver_left
from training.tracking import end_run, open_client, start_run
from training.workload import load_workload

pytestmark = [  # MLflow's: of its libraries, and on the answers of predict()
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning"),
]

SECRET = "content-of-a-record"
MODULE = Path("toy_workload.py")


def statuses() -> list[str]:
    client = open_client(Config.load().tracking_uri)
    experiment = client.get_experiment_by_name("convoy")
    assert experiment is not None
    return [run.info.status for run in client.search_runs([experiment.experiment_id])]


class TestTrain:
    @pytest.fixture
    def alone(self, work: Workspace) -> Workspace:
        """One worker: what is tried does not depend on their number."""
        work.set("train.dims.dp_replicate", 1)
        return work

    def test_a_changed_shard_in_the_store(self, alone: Workspace) -> None:
        placed = alone.read_json("artifacts/upload/eu.json")["placed"]
        broken = next(p for p in placed if p["shard"].startswith("train-US"))
        path = alone.path / ".convoy/stores/eu" / broken["address"]
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        refuse("train", f"rank 0 failed: shard {broken['shard']} in region eu", "Delete the object")
        assert statuses() == ["FAILED"]

    def test_a_worker_that_runs_out_of_memory_is_not_started_again(self, alone: Workspace) -> None:
        edit(
            MODULE,
            "    return cross_entropy(output, target)",
            "    loss.calls = getattr(loss, 'calls', 0) + 1\n"
            "    if loss.calls == 4:\n        output.new_empty(1 << 50)\n"
            "    return cross_entropy(output, target)",
        )
        words = "rank 0 failed: out of memory: toy_workload.loss() raised RuntimeError at toy_"
        refuse("train", words, "It held ", "a smaller train.global_batch")
        assert statuses() == ["FAILED"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root alone may")
    def test_nodes_that_could_not_reach_the_store(self, alone: Workspace) -> None:
        alone.set("train.network", {"namespaces": True})
        alone.set("regions.eu.store", "s3://bucket/convoy?region=eu-central-1")
        with pytest.raises(ConfigError, match="reach one another and nothing else") as raised:
            check_network(Config.load())
        assert "params.yaml: train.network.namespaces" in str(raised.value)
        assert "regions.eu.store is s3://bucket" in str(raised.value)

    def test_a_disk_that_fills_at_a_checkpoint(self, alone: Workspace) -> None:
        """So full that a worker cannot leave a word either; test_trainer goes on after it."""
        alone.set("train.model.hidden", 20_000)  # 1.2 MB a checkpoint
        alone.set("train.checkpoint", {"every_steps": 5, "keep": 2, "store": False})
        runs = Path(".convoy/runs")
        runs.mkdir(parents=True)
        small = ["mount", "-t", "tmpfs", "-o", "size=3400k", "tmpfs", str(runs)]
        subprocess.run(small, check=True)
        try:
            refuse("train", "could not be written (No space left on device)", "the one before it")
            commits = sorted(p.parent.name for p in runs.glob("*/*/*/committed.json"))
            assert [name[:13] for name in commits] == ["step-00000005", "step-00000010"]
            assert statuses() == ["FAILED"]
        finally:
            subprocess.run(["umount", "--lazy", str(runs)], check=True)

    def test_mlflow_that_ends_meanwhile_does_not_hide_what_went_wrong(
        self,
        alone: Workspace,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fail(*arguments: Any, **named: Any) -> None:
            raise WorkersFailed("rank 0 failed: a shard is broken")

        def unreachable(uri: str, answer_seconds: float) -> None:
            raise RegistryError(f"MLflow at {uri} does not answer")

        monkeypatch.setattr("pipeline.stages.run_workers", fail)
        monkeypatch.setattr("pipeline.runs.FLUSH_SECONDS", 0.0)
        monkeypatch.setattr("training.outbox.check_tracking", unreachable)
        with pytest.raises(WorkersFailed, match="a shard is broken"):
            STAGES["train"](Config.load())
        assert "does not answer" in capsys.readouterr().err
        [left] = (alone.path / workspace.OUTBOX).glob("*.jsonl")
        assert json.loads(left.read_bytes())["status"] == "FAILED"
        monkeypatch.undo()
        monkeypatch.chdir(alone.path)
        assert deliver_left(alone.path / workspace.OUTBOX, Config.load().tracking_uri) == 1
        assert statuses() == ["FAILED"]

    def test_another_mlflow_meanwhile_does_not_stop_training(
        self, alone: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: Any, **named: Any) -> None:
            raise WorkersFailed("killed")

        monkeypatch.setattr("pipeline.stages.run_workers", fail)
        # The same run again, whose MLflow run is not there; then another, which ends the first.
        for seed, database in ((1, "a"), (1, "b"), (2, "a")):
            alone.set("train.seed", seed)
            alone.set("register.tracking_uri", f"sqlite:///.convoy/{database}.db")
            with pytest.raises(WorkersFailed):
                STAGES["train"](Config.load())


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, uploaded: Workspace) -> Workspace:
    """A workspace with a model that pretends to be trained. Copy it; do not touch it."""
    from safetensors.torch import save_model

    path = tmp_path_factory.mktemp("scored") / "w"
    shutil.copytree(uploaded.path, path, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        config = Config.load()
        manifest = read_manifest(workspace.MANIFEST)
        readable, excluded = check_site(config, manifest)
        run_id = start_run(
            config.tracking_uri, "convoy", (path / "mlartifacts").as_uri(), "toy", {}, {}
        )
        end_run(config.tracking_uri, run_id, "FINISHED")
        workspace.TRAINED.mkdir()
        forget_workload()
        model = load_workload("toy_workload", path).model(config.train.model)
        save_model(model, str(workspace.TRAINED / "model.safetensors"))
        report = TrainReport(
            fingerprint=digest_training(config, manifest, readable),
            mlflow_run_id=run_id,
            steps=1,
            world_size=1,
            epochs=2.5,
            num_records={},
            excluded=tuple(excluded),
            final_loss=1.0,
            samples_per_second=1.0,
            resumed=False,
            incidents=(),
        )
        workspace.write_result(workspace.TRAINED / "report.json", report)
        line = {"step": 1, "loss": 0.7}
        (workspace.TRAINED / "steps.jsonl").write_text(json.dumps(line) + "\n")
        STAGES["evaluate"](config)
    forget_workload()
    return Workspace(path, uploaded.environment)


@pytest.fixture
def trained(scored: Workspace, work: Workspace) -> Workspace:
    """A copy of that workspace, as current directory."""
    shutil.copytree(scored.path, work.path, symlinks=True, dirs_exist_ok=True)
    return work


class TestEvaluate:
    def test_a_metric_that_is_not_there(self, trained: Workspace) -> None:
        trained.set("evaluate.primary", "acuracy")
        words = "evaluate.primary: there is no metric 'acuracy'; the workload gives accuracy"
        refuse("evaluate", "params.yaml: ", words)

    def test_a_training_of_other_parameters(self, trained: Workspace) -> None:
        trained.set("train.seed", 8)
        for stage in ("evaluate", "register"):
            refuse(stage, "artifacts/train is of other data, code, rules or parameters")

    def test_a_training_of_another_version_of_the_data(self, trained: Workspace) -> None:
        trained.set("shard.holdout", 0.3)
        for stage in ("shard", "upload"):
            STAGES[stage](Config.load())
        for stage in ("evaluate", "register"):
            refuse(stage, "artifacts/train is of other data", "run `convoy stage train`")

    def test_a_training_that_is_missing(self, trained: Workspace) -> None:
        shutil.rmtree("artifacts/train")
        refuse("evaluate", "artifacts/train/report.json is missing: run `convoy stage train`")

    def test_a_model_that_was_cut(self, trained: Workspace) -> None:
        weights = Path("artifacts/train/model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1])
        refuse("evaluate", "model.safetensors does not fit the workload's model or was changed")

    @pytest.mark.parametrize("split", ["train", "holdout"])
    def test_a_changed_shard_in_the_store(self, trained: Workspace, split: str) -> None:
        placed = trained.read_json("artifacts/upload/eu.json")["placed"]
        broken = next(p for p in placed if p["shard"].startswith(split))
        path = Path(".convoy/stores/eu") / broken["address"]
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        refuse("evaluate", f"shard {broken['shard']} in region eu", "Delete the object and run")

    def test_workers_find_the_same_and_fail_with_their_own_words(self, trained: Workspace) -> None:
        alone = trained.read("artifacts/evaluate/evaluation.json")
        trained.set("evaluate.workers", 2)
        STAGES["evaluate"](Config.load())
        assert trained.read("artifacts/evaluate/evaluation.json") == alone
        assert Path(".convoy/evaluation/scores.json").exists()
        weights = Path("artifacts/train/model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1])
        refuse("evaluate", " failed: ", "model.safetensors does not fit the workload's model or")

    def test_an_mlflow_that_does_not_answer(
        self, trained: Workspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pipeline.stages.FLUSH_SECONDS", 0.0)
        monkeypatch.setattr("pipeline.stages.AWAY_SECONDS", 0.0)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        STAGES["evaluate"](Config.load())  # its metrics wait
        refuse("register", "MLflow at http://127.0.0.1:9 does not answer")
        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        assert deliver_left(trained.path / workspace.OUTBOX, Config.load().tracking_uri) == 1
        assert not list((trained.path / workspace.OUTBOX).iterdir())


class TestUserCode:
    """What the workload raises in evaluate and register: type and place; its text stays here."""

    @pytest.mark.parametrize(
        ("function", "old"),
        [
            ("model()", "    from torch import nn\n\n"),
            ("collate()", "    inputs = torch"),
            ("metrics()", "    hits = (output"),
            ("baselines()", "    labels = ["),
            ("baselines()['majority']", "        hits = [(r"),
        ],
    )
    def test_in_evaluate(self, trained: Workspace, function: str, old: str) -> None:
        self.break_workload(trained, old)
        shown = refuse("evaluate", f"toy_workload.{function} raised ValueError at toy_workload.py:")
        assert SECRET not in shown
        assert SECRET in Path(".convoy/logs/user-error.txt").read_text()

    def test_in_the_models_forward(self, trained: Workspace) -> None:
        self.replace_workload(
            trained,
            "    return nn.Sequential(",
            "    class Net(nn.Sequential):\n"
            f"        def forward(self, x):\n            raise ValueError('{SECRET}')\n"
            "    return Net(",
        )
        shown = refuse("evaluate", "toy_workload.model(): its forward() raised ValueError at toy_w")
        assert SECRET not in shown

    def test_in_register(self, trained: Workspace) -> None:
        self.break_workload(trained, "    return [bool")
        shown = refuse("register", "toy_workload.predict() raised ValueError at toy_workload.py:")
        assert SECRET not in shown

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('{"majority": score}', "[score]", "baselines() gave a list: return a scorer for each"),
            ('{"accuracy": (float(sum', '{"accuracy": ("x", float(sum', "['majority'] gave a dict"),
            ("(float(hits), ", "(float('nan'), ", "metric accuracy of the model on "),
            (
                "(float(sum(hits)), ",
                "(float('inf'), ",
                "metric accuracy of baseline 'majority'",
            ),
        ],
    )
    def test_what_it_gives(self, trained: Workspace, old: str, new: str, words: str) -> None:
        self.replace_workload(trained, old, new)
        refuse("evaluate", words)

    def break_workload(self, trained: Workspace, old: str) -> None:
        indent = old[: len(old) - len(old.lstrip())]
        self.replace_workload(trained, old, f"{indent}raise ValueError('{SECRET}')\n{old}")

    def replace_workload(self, trained: Workspace, old: str, new: str) -> None:
        """Change the code, and let the training be of the changed code."""
        edit(MODULE, old, new)
        config = Config.load()
        manifest = read_manifest(workspace.MANIFEST)
        readable, _ = check_site(config, manifest)
        fingerprint = digest_training(config, manifest, readable)
        for path in ("artifacts/train/report.json", "artifacts/evaluate/evaluation.json"):
            content = trained.read_json(path) | {"fingerprint": fingerprint}
            Path(path).write_text(json.dumps(content))


class TestRegister:
    def test_an_evaluation_of_another_training(self, trained: Workspace) -> None:
        path = Path("artifacts/evaluate/evaluation.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "0" * 64}))
        refuse("register", "artifacts/evaluate is of another training than artifacts/train")

    def test_an_evaluation_that_is_missing(self, trained: Workspace) -> None:
        shutil.rmtree("artifacts/evaluate")
        refuse("register", "evaluation.json is missing: run `convoy stage evaluate`")

    def test_the_tags_are_the_whole_lineage(self, trained: Workspace) -> None:
        subprocess.run(["git", "add", "-A"], check=True)
        subprocess.run(
            ["git", "commit", "-qm", "Run"], check=True, env={**os.environ, **trained.environment}
        )
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True
        ).stdout.strip()
        config = Config.load()
        version = STAGES["register"](config).model_dump()
        tags = (
            open_client(config.tracking_uri).get_model_version("toy", str(version["version"])).tags
        )
        report = trained.read_json("artifacts/train/report.json")
        manifest = read_manifest(workspace.MANIFEST)
        assert tags["convoy.dataset"] == "toy"
        assert tags["convoy.manifest"] == manifest.digest
        assert tags["convoy.run"] == report["fingerprint"]
        assert tags["mlflow.run_id"] == report["mlflow_run_id"] == version["run_id"]
        assert tags["convoy.regions_read"] == "eu"
        assert tags["convoy.residency"] == config.residency.digest
        assert tags["git.revision"] == commit
        assert tags["dvc.lock"] == "none"
        assert len(tags["convoy.config"]) == 64
        excluded = json.loads(tags["convoy.excluded"])
        assert {e["jurisdiction"] for e in excluded} == {"CN"}
        assert int(tags["convoy.num_excluded"]) == 300
        assert float(tags["metric.accuracy"]) == version["value"]


def test_a_stage_that_succeeds_is_seen_to_change_something(trained: Workspace) -> None:
    """What `refuse` compares does differ when a stage does its work."""
    before = contents()
    trained.set("shard.records_per_shard", 32)
    STAGES["shard"](Config.load())
    assert contents() != before
    with pytest.raises(pytest.fail.Exception):
        refuse("upload")
    with pytest.raises(ConvoyError):
        STAGES["train"](Config.load().model_copy(update={"dataset": "other"}))
