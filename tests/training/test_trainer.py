"""The loop, in a process group of one: its schedule, what it refuses, and that it refuses early."""

import json
import math
import os
import re
import subprocess
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from data.manifest import read_manifest
from pipeline import workspace
from pipeline.config import Config
from storage.errors import ConvoyError
from tests.pipeline.conftest import edit
from tests.workspaces import Workspace
from training.config import OptimizerConfig, TrainConfig
from training.errors import CheckpointError, TrainingError, WorkloadError
from training.spec import NONFINITE_FILE, SPEC_FILE, STEPS_FILE, WEIGHTS_FILE, TrainSpec
from training.workload import load_workload

MODULE = Path("toy_workload.py")
SECRET = "content-of-a-record"
HERE: dict[str, Any] = {"checkpoint": {"every_steps": 10, "keep": 2, "store": False}}
"""So that a run in a fresh directory begins anew, and does not go on from the store."""


class Stopped(Exception):
    """A training ended by its test."""


def make_spec(
    work: Workspace,
    primary: str = "accuracy",
    fingerprint: str = "f" * 64,
    identity: dict[str, Any] | None = None,
    **train: Any,
) -> TrainSpec:
    """A training by one rank, with other values in `train`."""
    config = Config.load()
    section = config.train.model_dump() | {"dims": {"dp_replicate": 1}} | train
    directory = work.path / "run"
    directory.mkdir(exist_ok=True)
    return TrainSpec(
        root=work.path,
        workload=config.workload.module,
        config=TrainConfig.model_validate(section),
        primary=primary,
        manifest=work.path / workspace.MANIFEST,
        region=config.site,
        residency=config.residency,
        access_log=work.path / workspace.ACCESS_LOG,
        run_directory=directory,
        fingerprint=fingerprint,
        identity=identity or {},
        tracking_uri="",
        mlflow_run_id="",
    )


def run(work: Workspace, *, stop_after: int | None = None, **train: Any) -> list[dict[str, float]]:
    """Train in this process; the steps that it logged. It may be ended soon after a step."""
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from training.trainer import train as train_here

    spec = make_spec(work, **train)
    path = spec.run_directory / STEPS_FILE
    before = path.read_text().splitlines() if path.exists() else []
    num_steps = depth = 0

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def stop(*_: Any) -> None:
        nonlocal num_steps, depth
        depth -= 1
        # torch calls the hooks for an optimizer's base class too, once that has been made as such.
        num_steps += not depth
        if stop_after is not None and num_steps > stop_after:
            raise Stopped

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(stop)
    try:
        train_here(spec, load_workload(spec.workload, work.path))
    finally:
        for hook in hooks:
            hook.remove()
    # No two lines are the same: they say how long a step took.
    return [json.loads(line) for line in path.read_text().splitlines() if line not in before]


def refused(work: Workspace, kind: type[ConvoyError], *words: str, **train: Any) -> str:
    """All that a log would show of the error."""
    with pytest.raises(kind) as found:
        run(work, **train)
    for word in words:
        assert word in str(found.value)
    return "".join(traceback.format_exception(found.value))


def test_learning_rate() -> None:
    from training.optimization import learning_rate

    config = OptimizerConfig(lr=2.0, warmup_steps=4, final_lr_ratio=0.25)
    assert [learning_rate(config, step, 104) for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]
    assert learning_rate(config, 54, 104) == pytest.approx(2.0 * 0.625)  # half way
    assert learning_rate(config, 104, 104) == pytest.approx(0.5)
    rates = [learning_rate(config, step, 104) for step in range(4, 105)]
    assert rates == sorted(rates, reverse=True)
    assert learning_rate(OptimizerConfig(lr=1.0, final_lr_ratio=0.0), 1, 1) == pytest.approx(0.0)
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=9), 3, 3) == pytest.approx(1 / 3)


@pytest.mark.usefixtures("one_rank")
class TestTrain:
    def test_to_the_end_and_nothing_twice(self, work: Workspace) -> None:
        assert [line["step"] for line in run(work)] == [5, 10, 15, 20, 25, 30]
        weights = (work.path / "run" / WEIGHTS_FILE).read_bytes()
        assert run(work) == []  # from the last commit there is nothing left to do
        assert (work.path / "run" / WEIGHTS_FILE).read_bytes() == weights

    def test_a_cache_is_filled_and_changes_no_loss(self, work: Workspace) -> None:
        directory = work.path / "cache"
        cache = {"directory": str(directory), "limit_bytes": 1 << 20}
        alone: dict[str, Any] = {
            "checkpoint": {"store": False}
        }  # a second run would go on from the store
        losses = [line["loss"] for line in run(work, cache=cache, **alone)]
        kept = {path.name for path in directory.glob("*.sealed")}
        assert kept
        (work.path / "run").rename(work.path / "first")
        assert [line["loss"] for line in run(work, **alone)] == losses
        assert {path.name for path in directory.glob("*.sealed")} == kept

    def test_a_metric_that_is_not_there_is_found_before_the_first_step(
        self, work: Workspace
    ) -> None:
        refused(
            work,
            WorkloadError,
            "params.yaml: evaluate.primary: there is no metric 'acuracy'; the workload gives acc",
            primary="acuracy",
        )
        assert not (work.path / "run" / STEPS_FILE).exists()

    @pytest.mark.parametrize(
        ("function", "old"),
        [
            ("model()", "    from torch import nn\n\n"),
            ("collate()", "    inputs = torch"),
            ("loss()", "    return cross_entropy"),
            ("metrics()", "    hits = (output"),
            ("predict()", "    return [bool"),
        ],
    )
    def test_what_the_users_code_raises_is_said_without_its_text(
        self, work: Workspace, function: str, old: str
    ) -> None:
        edit(MODULE, old, f"    raise ValueError('{SECRET}')\n{old}")
        where = f"toy_workload.{function} raised ValueError at toy_workload.py:"
        assert SECRET not in refused(work, WorkloadError, where)
        assert SECRET in (work.path / ".convoy/logs/user-error.txt").read_text()

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            (
                "    return nn.Sequential(",
                "    return str(",
                "model() gave a str: return a torch.nn",
            ),
            (
                "    return inputs, torch",
                "    return torch",
                "collate() gave a Tensor: return a pai",
            ),
            ("cross_entropy(output, target)", "0.5", "loss() gave a float: return a tensor of one"),
            (
                "(float(hits), float(len(target)))",
                "0.5",
                "metrics() gave a dict: return {name: (to",
            ),
        ],
    )
    def test_what_the_users_code_gives_is_looked_at(
        self, work: Workspace, old: str, new: str, words: str
    ) -> None:
        if "nn.Seq" in old:
            edit(
                MODULE,
                "nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 2)",
                "1",
            )
        edit(MODULE, old, new)
        refused(work, WorkloadError, f"toy_workload.{words}")

    def test_a_loss_that_is_no_number_names_the_step(self, work: Workspace) -> None:
        infinite = "cross_entropy(output, target) / (output.sum() * 0)"
        edit(MODULE, "return cross_entropy(output, target)", f"return {infinite}")
        refused(work, TrainingError, "step 1: the workload's loss() gave", "must be finite")

    def test_a_loss_that_is_no_scalar(self, work: Workspace) -> None:
        edit(MODULE, "return cross_entropy(output, target)", "return output")
        words = "toy_workload.loss() gave a tensor of shape (2, 2): return a tensor of one number"
        refused(work, WorkloadError, words)

    def spoil(self, *steps: int) -> None:
        """Make the loss no number at these steps, and no others."""
        text = MODULE.read_text()
        old = re.search(r"    spoiled = .*", text)
        if old is None:
            edit(
                MODULE,
                "    return cross_entropy(output, target)",
                "    loss.calls = getattr(loss, 'calls', -1) + 1  # the first is the rehearsal's\n"
                f"    spoiled = {steps}\n"
                "    bad = float('nan') if loss.calls in spoiled else 1\n"
                "    return cross_entropy(output, target) * bad",
            )
        else:
            edit(MODULE, old.group(), f"    spoiled = {steps}")

    def test_a_loss_that_grows_without_bound_names_its_step(self, work: Workspace) -> None:
        self.spoil(12)
        batch = "global positions 352 to 383, epoch 0"
        refused(work, TrainingError, "step 12: ", "gave nan", "Lower train.optimizer.lr", batch)
        assert not [thread for thread in threading.enumerate() if thread.name == "loader"]
        [commit] = Path("run").glob("*/*/committed.json")
        assert commit.parent.name.startswith("step-00000010-")

    def test_a_batch_is_left_out(self, work: Workspace) -> None:
        whole = run(work, **HERE)
        Path("run").rename("whole")
        self.spoil(12, 13)
        lines = run(work, **HERE, on_nonfinite="skip")
        assert [line["step"] for line in lines] == [5, 10, 15, 20, 25, 30]
        assert [line["loss"] for line in lines[:2]] == [line["loss"] for line in whole[:2]]
        assert all(math.isfinite(line["loss"]) for line in lines)
        first, second = map(json.loads, Path("run", NONFINITE_FILE).read_text().splitlines())
        assert (first["step"], second["step"], first["action"]) == (12, 13, "skip")
        names = {shard.name for shard in read_manifest(work.path / workspace.MANIFEST).of("train")}
        assert {name for name, _ in first["samples"]} <= names
        assert len({tuple(sample) for sample in first["samples"]}) == 32
        self.spoil(*range(1, 31))
        Path("run").rename("skipped")
        words = "step 3: ", "params.yaml: train.max_nonfinite: 2 were left out before it"
        refused(work, TrainingError, *words, **HERE, on_nonfinite="skip", max_nonfinite=2)

    def test_back_to_the_last_checkpoint(
        self, work: Workspace, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.spoil(14)
        assert [line["step"] for line in run(work, **HERE, on_nonfinite="roll_back")][-1] == 30
        assert "step 14: the gradient's norm is nan: the parameters are those of step 10" in (
            caplog.text
        )
        self.spoil(3)
        Path("run").rename("whole")
        words = "step 3: ", "there is no checkpoint yet to go back to"
        refused(work, TrainingError, *words, **HERE, on_nonfinite="roll_back")

    @pytest.mark.parametrize("how", ["changed", "cut", "swapped", "gone"])
    def test_a_shard_in_the_store(self, work: Workspace, how: str) -> None:
        placed = work.read_json("artifacts/upload/eu.json")["placed"]
        named = [p for p in placed if p["shard"].startswith("train-")]
        store = work.path / ".convoy/stores/eu"
        first, second = (store / named[n]["address"] for n in (0, 1))
        if how == "changed":
            content = bytearray(first.read_bytes())
            content[len(content) // 2] ^= 1
            first.write_bytes(content)
        elif how == "cut":
            first.write_bytes(first.read_bytes()[:-1])
        elif how == "swapped":
            first.write_bytes(second.read_bytes())
        else:
            first.unlink()
        refused(work, ConvoyError, f"shard {named[0]['shard']}", "region eu", "convoy stage upload")

    @pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root alone may")
    def test_a_disk_that_fills_at_a_checkpoint_loses_no_step(self, work: Workspace) -> None:
        large: dict[str, Any] = {
            "model": {"hidden": 20_000},
            "checkpoint": {"every_steps": 5, "keep": 2},
        }
        Path("run").mkdir()
        small = ["mount", "-t", "tmpfs", "-o", "size=3400k", "tmpfs", "run"]  # for two, of 1.2 MB
        subprocess.run(small, check=True)
        try:
            words = "step-00000015-", "could not be written (No space left on device)", "make room"
            refused(work, CheckpointError, *words, **large)
            commits = sorted(path.parent.name for path in Path("run").glob("*/*/committed.json"))
            assert [name[:13] for name in commits] == ["step-00000005", "step-00000010"]
            subprocess.run(["mount", "-o", "remount,size=40m", "run"], check=True)
            assert [line["step"] for line in run(work, **large)] == [15, 20, 25, 30]
        finally:
            subprocess.run(["umount", "--lazy", "run"], check=True)

    def test_a_checkpoint_of_another_run(self, work: Workspace) -> None:
        run(work)
        marker = max(Path("run").glob("*/*/committed.json"))
        content = json.loads(marker.read_text())
        marker.write_text(json.dumps(content | {"fingerprint": "0" * 64}))
        refused(work, CheckpointError, "is of another run (000000000000, this one is ffffffffffff)")

    def test_a_world_that_was_given_up_commits_nothing(self, work: Workspace) -> None:
        Path("run").mkdir()
        Path("run", SPEC_FILE).write_text('{"fencing_token": 1}')
        refused(work, CheckpointError, "is not committed: a later world of this run was started")
        assert not list(Path("run").glob("*/*/committed.json"))

    def test_a_checkpoint_that_was_cut(self, work: Workspace) -> None:
        run(work)
        [content] = max(Path("run").glob("checkpoints/step-*")).glob("state-0")
        content.write_bytes(content.read_bytes()[:300])
        words = "step-00000030-", " cannot be read (", "delete it and run `convoy stage train`"
        refused(work, CheckpointError, *words)

    def test_weights_that_cannot_be_written(self, work: Workspace) -> None:
        (work.path / "run" / WEIGHTS_FILE).mkdir(parents=True)
        words = "model.safetensors could not be written", "the last checkpoint is whole"
        refused(work, CheckpointError, *words)
        (work.path / "run" / WEIGHTS_FILE).rmdir()
        assert run(work) == []
