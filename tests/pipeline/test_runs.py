"""Which run a training goes on with, and which checkpoints go."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline import workspace
from pipeline.checks import check_site, read_current_manifest
from pipeline.config import Config
from pipeline.progress import Progress, listening
from pipeline.runs import Run, open_run
from tests.workspaces import Workspace
from training.checkpoint_commit import MARKER, Commit

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
