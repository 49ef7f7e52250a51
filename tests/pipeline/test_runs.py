"""Which run a training goes on with, and which checkpoints go."""

import contextlib
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline import workspace
from pipeline.checks import check_site, read_current_manifest
from pipeline.config import Config
from pipeline.progress import Progress, listening
from pipeline.runs import Run, is_standing, open_run, retire_results
from pipeline.stages import TrainReport, train
from pipeline.versioning import find_stale
from tests.workspaces import Workspace
from training.checkpoint_commit import MARKER, Commit
from training.tracking import open_client, read_runs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # MLflow's own


class Stopped(BaseException):
    """As an interrupt."""


@contextlib.contextmanager
def training(work: Workspace, seed: int) -> Iterator[Run]:
    work.set("train.seed", seed)
    config = Config.load()
    manifest = read_current_manifest(config)
    readable, excluded = check_site(config, manifest)
    with open_run(config, work.path, manifest, readable, excluded) as run:
        yield run


def commit(run: Run) -> Path:
    """A checkpoint of it, as far as its marker."""
    marker = run.directory / "checkpoints" / "step-00000010-a" / MARKER
    marker.parent.mkdir(parents=True)
    content = Commit(
        step=10,
        cursor=320,
        fingerprint=run.fingerprint,
        identity=run.identity,
        time=datetime.now(UTC),
        files={},
    )
    marker.write_text(content.model_dump_json())
    return marker


def test_a_stopped_run_is_named_and_can_be_gone_on_with_later(work: Workspace) -> None:
    said: list[Progress] = []
    with contextlib.suppress(Stopped), training(work, 1) as first:
        marker = commit(first)
        raise Stopped
    with contextlib.suppress(Stopped), listening(said.append), training(work, 2) as second:
        assert not second.resumed
        raise Stopped
    [note] = [progress.note for progress in said]
    assert f"run {first.directory.name} was stopped at step 10 and is another run" in note
    assert "(train.seed is 2 and was 1)" in note
    assert marker.exists()
    with training(work, 1) as again:
        assert again.resumed
        assert again.mlflow_run_id == first.mlflow_run_id
    assert marker.exists()  # to be exported
    with training(work, 3):
        assert not marker.exists()
        assert list((work.path / workspace.RUNS).glob("*/checkpoints")) == []


_KILLED_AFTER_IT = """
import os, signal
from pipeline.config import Config
from pipeline.stages import train
train(Config.load())
os.kill(os.getpid(), signal.SIGKILL)
"""

_KILLED_AS_IT_ENDS = """
import os, signal
from pipeline.config import Config
from pipeline.stages import train
from training.outbox import Outbox
note_end = Outbox.note_end
def note_end_and_die(outbox, status):
    note_end(outbox, status)
    os.kill(os.getpid(), signal.SIGKILL)
Outbox.note_end = note_end_and_die
train(Config.load())
"""


def test_a_training_that_ended_before_dvc_knew_of_it_is_not_done_again(work: Workspace) -> None:
    work.run("python", "-c", _KILLED_AFTER_IT, expect=-signal.SIGKILL)
    report = work.read("artifacts/train/report.json")
    assert find_stale(work.path, "train") == ["not run before"]
    assert train(Config.load()) == TrainReport.model_validate_json(report)
    assert work.read("artifacts/train/report.json") == report
    check_told_once()

    # What does not change the result changes how it is come by.
    work.set("train.dims", {"dp_replicate": 1})
    assert not stands()
    work.set("train.dims", {"dp_replicate": 2})
    assert stands()
    weights = Path("artifacts/train/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert not stands()
    weights.write_bytes(whole)
    assert stands()
    retire_results(work.path)  # as a run does that is to do all of it anew
    assert not stands()


def test_a_training_that_is_killed_as_it_tells_its_end_tells_each_step_once(
    work: Workspace,
) -> None:
    work.run("python", "-c", _KILLED_AS_IT_ENDS, expect=-signal.SIGKILL)
    train(Config.load())
    check_told_once()


def stands() -> bool:
    config = Config.load()
    manifest = read_current_manifest(config)
    return is_standing(config, Path.cwd(), manifest, check_site(config, manifest)[0])


def check_told_once() -> None:
    """MLflow has one run, FINISHED, and each logged step once."""
    config = Config.load()
    [run] = read_runs(config.tracking_uri, config.registration.experiment)
    assert run.status == "FINISHED"
    history = open_client(config.tracking_uri).get_metric_history(run.run_id, "loss")
    assert sorted(metric.step for metric in history) == [5, 10, 15, 20, 25, 30]
    assert not list(workspace.OUTBOX.glob("*"))
