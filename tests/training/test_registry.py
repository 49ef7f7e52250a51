"""The registered model: loads alone, carries its lineage, and is champion only if it is better."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pytest

from storage.errors import ConvoyError
from tests.pipeline.conftest import edit, forget_workload
from tests.workspaces import TOY
from training import registry
from training.champion import seat
from training.errors import RegistryError, WorkloadError
from training.evaluate import Metrics, Score
from training.logged_model import log_model
from training.registry import ModelVersion, register_model
from training.tracking import end_run, open_client, read_champion, start_run
from training.workload import load_workload

pytestmark = [  # MLflow's: of its libraries, and on the answers of predict()
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Any type hint is inferred:UserWarning"),
]

SECRET = "content-of-a-record"
TAGS = {"convoy.manifest": "m" * 64, "convoy.config": "c" * 64, "git.revision": "g" * 40}

FRESH = """
import sys, json
class Absent:
    # `data` is inside the model; nothing else of Convoy, nor the workspace, may be asked for.
    blocked = {"flows", "tasks", "pipeline", "planner", "training", "storage", "examples", "tests"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ImportError(f"{name} is not here")
sys.meta_path.insert(0, Absent())
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/toy@champion")
import pandas as pd
rows = json.loads(sys.argv[2])
answers = model.predict(pd.DataFrame(rows))
assert len(model.predict([{"a": 1, "b": 0}])) == 1  # whole numbers where the example had others
import data.record, toy_workload
print(json.dumps({"answers": [bool(a) for a in answers],
                  "files": [data.record.__file__, toy_workload.__file__],
                  "signature": model.metadata.signature.to_dict()}))
"""


@dataclass
class Place:
    """A folder with the toy workload, a trained model of it, and an MLflow of its own."""

    path: Path
    tracking_uri: str
    run_id: str
    number: int = 0

    def register(
        self, value: float = 0.9, goal: Literal["minimize", "maximize"] = "maximize", **more: Any
    ) -> ModelVersion:
        forget_workload()
        score = Score(model={"accuracy": value}, baselines={})
        options: dict[str, Any] = {"name": "toy", "tracking_uri": self.tracking_uri} | more
        self.number += 1
        fingerprint = f"{self.number:064x}"  # another training each time
        return register_model(
            load_workload("toy_workload", self.path),
            self.path / "toy_workload.py",
            self.path / "model.safetensors",
            {"hidden": 4},
            Metrics(
                fingerprint=fingerprint,
                primary="accuracy",
                goal=goal,
                overall=score,
                by_jurisdiction={"EU": score},
                num_records={"EU": 5},
                excluded=(),
            ),
            run_id=self.run_id,
            tags=TAGS,
            **options,
        )


def make_place(path: Path, tracking_uri: str, run_id: str) -> Place:
    from safetensors.torch import save_model

    (path / "toy_workload.py").write_bytes(TOY.read_bytes())
    forget_workload()
    model = load_workload("toy_workload", path).model({"hidden": 4})
    save_model(model, str(path / "model.safetensors"))
    return Place(path, tracking_uri, run_id)


@pytest.fixture(scope="module")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(scope="module")
def mlflow_run(mlflow_uri: str) -> str:
    artifacts = Path(mlflow_uri.removeprefix("sqlite:///")).with_name("artifacts").as_uri()
    return start_run(mlflow_uri, "convoy", artifacts, "toy-1", {"a": "b"}, {"train.steps": 3})


@pytest.fixture
def place(tmp_path: Path, mlflow_uri: str, mlflow_run: str) -> Iterator[Place]:
    yield make_place(tmp_path, mlflow_uri, mlflow_run)
    forget_workload()


def test_the_model_loads_alone_in_another_process(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    version = place.register()
    assert (version.version, version.champion) == (1, True)
    assert version.reason == "there was no champion"
    (place.path / "toy_workload.py").unlink()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    rows = [{"a": 0.9, "b": 0.9}, {"a": 0.1, "b": 0.1}, {"a": 0.5, "b": 0.2}]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", FRESH, place.tracking_uri, json.dumps(rows)],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["answers"]) == 3
    assert all("/artifacts/" in file and "/code/" in file for file in found["files"])
    assert [column["name"] for column in json.loads(found["signature"]["inputs"])] == ["a", "b"]
    assert found["signature"]["outputs"]

    client = open_client(place.tracking_uri)
    stored = client.get_model_version("toy", "1")
    assert len(stored.tags.pop("convoy.registration")) == 64
    assert stored.tags == TAGS | {
        "metric.accuracy": "0.9",
        "convoy.previous_champion": "",
        "convoy.champion_reason": "there was no champion",
    }
    assert stored.run_id == place.run_id
    champion = read_champion(place.tracking_uri, "toy")
    assert champion is not None
    assert (champion.version, champion.value, champion.manifest) == (1, 0.9, "m" * 64)


def test_what_mlflow_keeps_holds_no_record_but_the_example(place: Place) -> None:
    version = place.register(name="kept")
    stored = Path(place.tracking_uri.removeprefix("sqlite:///")).parent
    client = open_client(place.tracking_uri)
    source = client.get_model_version("kept", str(version.version)).source
    assert source is not None
    model_id = source.rsplit("/", 1)[-1]
    [folder] = [path for path in stored.rglob(model_id) if path.is_dir()]
    names = {str(p.relative_to(folder / "artifacts")) for p in folder.rglob("*") if p.is_file()}
    assert {"artifacts/model.safetensors", "artifacts/spec.json"} <= names
    assert {"code/toy_workload.py", "code/data/record.py", "code/data/__init__.py"} <= names
    assert not [name for name in names if name.endswith((".arrow", ".csv", ".pkl"))]
    example = json.loads((folder / "artifacts" / "input_example.json").read_text())
    assert example["data"] == [[0.9, 0.8], [0.1, 0.2]]


def log_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried is the gate: the model itself need not be logged for each version."""

    logged: list[str] = []

    def log(*arguments: Any) -> str:
        if not logged:
            logged.append(log_model(*arguments))
        return logged[0]

    monkeypatch.setattr(registry, "log_model", log)


@pytest.mark.parametrize(
    ("goal", "values", "champions"),
    [
        ("maximize", (0.5, 0.4, 0.5, 0.6), [True, False, False, True]),
        ("minimize", (0.5, 0.6, 0.5, 0.4), [True, False, False, True]),
    ],
)
def test_the_alias_moves_to_a_better_model_alone(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    goal: Literal["minimize", "maximize"],
    values: tuple[float, ...],
    champions: list[bool],
) -> None:
    log_once(place, monkeypatch)
    versions = [place.register(value, goal, name=f"gate-{goal}") for value in values]
    assert [version.champion for version in versions] == champions
    assert [version.previous_champion for version in versions] == [None, 1, 1, 1]
    assert "does not beat 0.5000 of version 1" in versions[2].reason
    found = read_champion(place.tracking_uri, f"gate-{goal}")
    assert found is not None
    assert found.version == 4


def test_a_champion_of_another_metric_stays(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log_once(place, monkeypatch)
    place.register(name="other-metric")
    client = open_client(place.tracking_uri)
    client.delete_model_version_tag("other-metric", "1", "metric.accuracy")
    client.set_model_version_tag("other-metric", "1", "metric.loss", "0.1")
    version = place.register(0.99, name="other-metric")
    assert not version.champion
    assert version.reason == "champion version 1 has no metric accuracy"


def test_an_exception_of_predict_keeps_its_text_here(place: Place) -> None:
    answer = "    return [bool"
    edit(place.path / "toy_workload.py", answer, f"    raise KeyError('{SECRET}')\n{answer}")
    with pytest.raises(WorkloadError) as refused:
        place.register(name="raises")
    assert "toy_workload.predict() raised KeyError at toy_workload.py:" in str(refused.value)
    assert SECRET not in str(refused.value)
    assert SECRET in (place.path / ".convoy/logs/user-error.txt").read_text()


def test_without_predict_it_answers_rows_that_collate_reads(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    edit(place.path / "toy_workload.py", "def predict(", "def _predict(")
    edit(place.path / "toy_workload.py", "example =", "_example =")
    assert place.register(name="raw").answers == "raw output"
    assert "signature" not in caplog.text
    mlflow.set_tracking_uri(place.tracking_uri)
    forget_workload()
    model = mlflow.pyfunc.load_model("models:/raw@champion")
    rows = [{"a": 0.9, "b": 0.9}, {"a": 0.1, "b": 0.1}]
    answers = model.predict(rows)
    assert [len(answer) for answer in answers] == [2, 2]
    assert model.predict(pd.DataFrame(rows)) == answers
    said = r"toy_workload has no predict\(\), so its collate\(\) .* over field 'b': give rows"
    with pytest.raises(mlflow.MlflowException, match=said) as refused:
        model.predict([{"a": 0.9}])
    assert refused.value.error_code == "INVALID_PARAMETER_VALUE"
    with pytest.raises(mlflow.MlflowException, match="over ValueError: give rows") as refused:
        model.predict([{"a": SECRET, "b": 1}])
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("wins", [True, False])
def test_how_far_two_models_are_apart_and_how_to_compare_them(place: Place, wins: bool) -> None:
    client = open_client(place.tracking_uri)
    name = f"apart-{wins}"
    client.create_registered_model(name)
    for number, manifest in enumerate(("m" * 64, "n" * 64), 1):
        value = 0.5 if number == 1 else 0.9 if wins else 0.1
        score = Score(model={"accuracy": value}, baselines={})
        metrics = Metrics(
            fingerprint="f" * 64,
            primary="accuracy",
            goal="maximize",
            overall=score,
            by_jurisdiction={},
            num_records={"EU": 3, "US": 2},
            excluded=(),
        )
        tags = TAGS | {"convoy.manifest": manifest, "metric.accuracy": repr(value)}
        created = client.create_model_version(name, "file:///nowhere", place.run_id, tags=tags)
        version = seat(client, name, created, metrics, tags)
    assert version.wins == wins
    assert ", a difference of 2 of 5 held-out records. The two were measured on" in version.reason
    assert "check out gggggggggggg, its revision, in a copy of this folder" in version.reason
    again = "should be the champion again" if wins else "set register.model_name anew"
    assert again in version.reason


def test_a_model_that_is_not_that_of_the_weights(place: Place) -> None:
    (place.path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConvoyError, match=r"model.safetensors does not fit .*convoy stage train"):
        place.register(name="cut")


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "sqlite:////nonexistent/mlflow.db"])
def test_an_mlflow_that_cannot_be_reached(place: Place, uri: str) -> None:
    with pytest.raises(RegistryError, match="MLflow at "):
        place.register(tracking_uri=uri)
    with pytest.raises(RegistryError, match=r"params.yaml: register.tracking_uri"):
        start_run(uri, "convoy", "file:///nonexistent", "x", {}, {})


def test_how_a_run_ended_is_not_said_twice(mlflow_uri: str, mlflow_run: str) -> None:
    def status() -> str:
        found: str = open_client(mlflow_uri).get_run(mlflow_run).info.status
        return found

    assert end_run(mlflow_uri, mlflow_run, "FAILED")
    assert end_run(mlflow_uri, mlflow_run, "KILLED")
    assert status() == "FAILED"
    assert end_run(mlflow_uri, mlflow_run, "RUNNING")
    assert end_run(mlflow_uri, mlflow_run, "KILLED")
    assert status() == "KILLED"
    assert not end_run(mlflow_uri, "0" * 32, "RUNNING")
    assert not end_run(mlflow_uri, "0" * 32, "KILLED")


def test_long_tags_do_not_stop_a_run(mlflow_uri: str, mlflow_run: str) -> None:
    run_id = start_run(mlflow_uri, "convoy", "", "x", {"convoy.excluded": "x" * 50_000}, {})
    assert open_client(mlflow_uri).get_run(run_id).data.tags["convoy.excluded"].startswith("xxx")


def test_a_killed_registration_leaves_no_half_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.killed_registration", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "14"
    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")
    models = client.search_registered_models()
    assert len(models) == 14
    for model in models:
        [version] = client.search_model_versions(f"name = '{model.name}'")
        assert {*TAGS, "metric.accuracy", "convoy.registration"} <= set(version.tags)
        assert version.tags["convoy.champion_reason"] == "there was no champion"
        assert client.get_model_version_by_alias(model.name, "champion").version == version.version
        logged = client.get_logged_model(str(version.source).rsplit("/", 1)[-1])
        assert str(logged.status) == "READY"
        files = Path(logged.artifact_location.removeprefix("file://"))
        assert (files / "artifacts/model.safetensors").exists()
    [run] = client.search_runs(["1"])
    assert run.info.status == "FINISHED"
    every = client.search_logged_models(["1"])
    assert {str(model.status) for model in every} == {"READY"}  # half ones are deleted
    assert not list(Path(tempfile.gettempdir()).glob("convoy-model-*"))
