"""Training runs in the workspace: their directory, their MLflow run, and how they ended."""

import contextlib
import filecmp
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from data.manifest import Manifest
from data.residency import Exclusion
from data.shard import Shard
from pipeline import workspace
from pipeline.checks import check_artifact_root
from pipeline.config import Config
from pipeline.lineage import describe_training, digest_config, digest_training, lineage_tags
from pipeline.progress import report
from storage.store import open_store
from training.checkpoint_commit import find_on_disk, remove_stored, store_folder
from training.checkpoint_identity import explain_difference
from training.outbox import Outbox, deliver_left, open_outbox
from training.spec import SPEC_FILE, STEPS_FILE, WEIGHTS_FILE, rank_steps_file
from training.tracking import await_tracking, end_run, start_run

_RUN_ID = "mlflow_run_id"
_START = "mlflow_start"
"""Marks the MLflow run before it is made, so that one that nobody noted is found again."""
_ENDED = "ended"
"""How it ended; with FINISHED comes the digest of the configuration for which its result stands."""
AWAY_SECONDS = 150.0
"""For so long a stage waits for an MLflow that was there before."""
FLUSH_SECONDS = 10.0
_FINISHED: Literal["FINISHED"] = "FINISHED"
_KILLED: Literal["KILLED"] = "KILLED"


@dataclass(frozen=True)
class Run:
    """One training run; a killed one is found again by its fingerprint and goes on."""

    directory: Path
    fingerprint: str
    identity: dict[str, Any]
    """All that the fingerprint is of."""
    mlflow_run_id: str
    resumed: bool
    outbox: Outbox
    """What MLflow is to be told of it."""


@contextlib.contextmanager
def open_run(
    config: Config,
    root: Path,
    manifest: Manifest,
    readable: Sequence[Shard],
    excluded: Sequence[Exclusion],
) -> Iterator[Run]:
    """The run of this training, new or resumed. Its MLflow run ends as the block ends:
    FINISHED, FAILED by an exception, KILLED by an interrupt or a signal.

    Runs that were killed before they could say so are marked KILLED first.
    """
    identity = describe_training(config, manifest, readable)
    fingerprint = digest_training(config, manifest, readable)
    directory = root / workspace.RUNS / fingerprint[:16]
    with workspace.explain_disk(directory):
        outboxes = root / workspace.OUTBOX
        if any((root / workspace.RUNS).glob(f"*/{_RUN_ID}")):
            await_tracking(config.tracking_uri, AWAY_SECONDS)
            deliver_left(outboxes, config.tracking_uri)
        _mark_killed(config, root, directory, identity)
        if _is_finished(directory):
            _forget_stored(config, directory)
            shutil.rmtree(directory)
        (directory / _ENDED).unlink(missing_ok=True)
        _forget_finished(config, root)
        marker, mark = directory / _RUN_ID, directory / _START
        resumed = marker.exists()
        run_id = marker.read_text() if resumed else ""
        if not (run_id and end_run(config.tracking_uri, run_id, "RUNNING")):
            directory.mkdir(parents=True, exist_ok=True)
            if resumed or not mark.exists():
                mark.write_text(uuid.uuid4().hex)
            run_id = start_run(
                config.tracking_uri,
                config.registration.experiment,
                (root / workspace.STATE / "mlartifacts").as_uri(),
                f"{config.dataset}-{fingerprint[:8]}",
                lineage_tags(config, root, manifest, excluded) | {"convoy.run": fingerprint},
                _flatten(config.train.model_dump(mode="json"), "train"),
                partial(check_artifact_root, config),
                mark.read_text(),
            )
            marker.write_text(run_id)
        with open_outbox(outboxes, run_id) as outbox:
            yield from _follow(
                Run(directory, fingerprint, identity, run_id, resumed, outbox), config
            )
        # The result now stands in artifacts/train; the store's checkpoints were for going on. Those
        # on disk can be exported until another run begins.
        _forget_stored(config, directory)


def _follow(run: Run, config: Config) -> Iterator[Run]:
    """Give the run, and tell MLflow how that ended: what ended it is the error to show, whatever
    becomes of the word of it."""
    try:
        yield run
    except BaseException as error:
        is_error = isinstance(error, Exception)
        run.outbox.note_end("FAILED" if is_error else "KILLED")
        run.outbox.deliver_for(config.tracking_uri, FLUSH_SECONDS if is_error else 0.0)
        raise
    # Before MLflow is told: who finds it there knows that the outbox holds all that is to be told.
    (run.directory / _ENDED).write_text(_finished_with(config))
    run.outbox.note_end("FINISHED")
    run.outbox.deliver_for(config.tracking_uri, FLUSH_SECONDS)


def result_files(directory: Path) -> list[Path]:
    """What a run that came to its end leaves of its result."""
    return [
        directory / WEIGHTS_FILE,
        directory / STEPS_FILE,
        *sorted(directory.glob(rank_steps_file("*"))),
    ]


def is_standing(config: Config, root: Path, manifest: Manifest, readable: Sequence[Shard]) -> bool:
    """Whether this very training came to its end, with this configuration, and its result stands
    whole in the workspace: then whoever called it died before DVC knew of it.

    Sees to it that MLflow knows; a run that MLflow has lost does not stand. Raises RegistryError
    when MLflow is away.
    """
    fingerprint = digest_training(config, manifest, readable)
    directory, trained = root / workspace.RUNS / fingerprint[:16], root / workspace.TRAINED
    ended, report_file = directory / _ENDED, trained / "report.json"
    if not (ended.exists() and ended.read_text() == _finished_with(config)):
        return False
    run_id = (directory / _RUN_ID).read_text()
    said = json.loads(report_file.read_bytes()) if report_file.exists() else {}
    if (said.get("fingerprint"), said.get("mlflow_run_id")) != (fingerprint, run_id):
        return False
    for path in result_files(directory):
        there = trained / path.name
        if not (there.exists() and filecmp.cmp(path, there, shallow=False)):
            return False
    await_tracking(config.tracking_uri, AWAY_SECONDS)
    deliver_left(root / workspace.OUTBOX, config.tracking_uri)
    if not end_run(config.tracking_uri, run_id, _FINISHED):
        return False
    _forget_stored(config, directory)
    return True


def retire_results(root: Path) -> None:
    """Have no training given again that has come to its end so far: all is to be done anew."""
    for ended in (root / workspace.RUNS).glob(f"*/{_ENDED}"):
        if _is_finished(ended.parent):
            ended.write_text(_FINISHED)


def _finished_with(config: Config) -> str:
    return f"{_FINISHED} {digest_config(config)}"


def _is_finished(directory: Path) -> bool:
    """Whether the run came to its end; one that was left for another can still be gone on with."""
    ended = directory / _ENDED
    return ended.exists() and ended.read_text() != _KILLED


def _forget_finished(config: Config, root: Path) -> None:
    """The checkpoints of runs that came to their end, on disk and in the store."""
    for checkpoints in (root / workspace.RUNS).glob("*/checkpoints"):
        if _is_finished(checkpoints.parent):
            _forget_stored(config, checkpoints.parent)
            shutil.rmtree(checkpoints)


def _forget_stored(config: Config, directory: Path) -> None:
    """The run's checkpoints in the store, if that is the one that training uses now."""
    spec = directory / SPEC_FILE
    if spec.exists() and json.loads(spec.read_bytes())["region"]["store"] == config.site.store:
        remove_stored(open_store(config.site), store_folder(directory.name))


def _mark_killed(config: Config, root: Path, present: Path, identity: dict[str, Any]) -> None:
    """Runs of other fingerprints in this workspace, which is locked: none of them is at work.

    Says of those that could have been gone on with in what they differ from the present one.
    """
    for marker in (root / workspace.RUNS).glob(f"*/{_RUN_ID}"):
        directory = marker.parent
        if directory != present and not (directory / _ENDED).exists():
            end_run(config.tracking_uri, marker.read_text(), "KILLED")
            (directory / _ENDED).write_text(_KILLED)
            found = find_on_disk(directory / "checkpoints")
            if found:
                commit = found[-1].commit
                report(
                    "train",
                    0,
                    config.train.steps,
                    "steps",
                    f"run {directory.name} was stopped at step {commit.step} and is another run"
                    f"{explain_difference(commit.identity, identity)}: with its parameters it "
                    "would go on",
                )


def _flatten(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}"
        flat |= _flatten(value, name) if isinstance(value, dict) else {name: value}
    return flat
