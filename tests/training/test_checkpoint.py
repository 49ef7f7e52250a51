"""Checkpoints of real training: sealed, whole or not there, in two places, for any layout."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from tests.training.parallel_steps import configure, make_places, places
from tests.training.ranks import run_ranks
from tests.training.test_trainer import Stopped, make_spec, refused, run
from tests.workspaces import Workspace
from training.checkpoint_commit import MARKER
from training.errors import CheckpointError
from training.spec import STEPS_FILE, WEIGHTS_FILE, rank_steps_file

RUN = Path("run")
STORED = Path(".convoy/stores/eu/checkpoints/run")
LARGE: dict[str, Any] = {"model": {"hidden": 20_000}}
"""Parameters of which a part would be seen in a file."""


def newest() -> Path:
    return max(RUN.glob("checkpoints/step-*"))


def forget_disk() -> None:
    shutil.rmtree(RUN)


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    def test_sealed_on_disk_and_in_the_store(self, work: Workspace) -> None:
        from safetensors.torch import load_file

        run(work, **LARGE)
        weights = load_file(RUN / WEIGHTS_FILE)
        plain = [tensor.numpy().tobytes()[:256] for tensor in weights.values()]
        assert all(part in (RUN / WEIGHTS_FILE).read_bytes() for part in plain)
        files = [path for path in newest().iterdir() if path.name != MARKER]
        assert {path.name for path in files} == {"state-0", "rank-0", "metadata"}
        for path in files:
            content = path.read_bytes()
            assert not [part for part in plain if part in content]
            assert path.stat().st_mode & 0o077 == 0
            assert (STORED / newest().name / path.name).read_bytes() == content

    def test_a_lost_disk_goes_on_from_the_store_with_its_whole_curve(self, work: Workspace) -> None:
        run(work, checkpoint={"every_steps": 10, "store": False})
        undisturbed = [(RUN / name).read_bytes() for name in (WEIGHTS_FILE, "steps.jsonl")]
        forget_disk()
        with pytest.raises(Stopped):
            run(work, checkpoint={"every_steps": 10}, stop_after=20)
        stored = sorted(marker.parent.name for marker in STORED.glob(f"*/{MARKER}"))
        assert [name[:13] for name in stored] == ["step-00000010", "step-00000020"]
        forget_disk()
        run(work)
        own = (RUN / rank_steps_file(0)).read_text().splitlines()  # the store has none of it
        assert [json.loads(line)["step"] for line in own] == [25, 30]
        assert (RUN / WEIGHTS_FILE).read_bytes() == undisturbed[0]
        losses = [json.loads(line)["loss"] for line in undisturbed[1].splitlines()]
        kept = (RUN / STEPS_FILE).read_text().splitlines()
        assert [json.loads(line)["loss"] for line in kept] == losses

    @pytest.mark.parametrize("file", ["state-0", "rank-0", "metadata"])
    def test_a_flipped_bit_is_refused(self, work: Workspace, file: str) -> None:
        run(work)
        path = newest() / file
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        refused(work, CheckpointError, newest().name, "cannot be read", "does not authenticate")

    def test_a_changed_marker_is_refused(self, work: Workspace) -> None:
        run(work)
        marker = newest() / MARKER
        content = json.loads(marker.read_text())
        marker.write_text(json.dumps(content | {"cursor": 0}))
        refused(work, CheckpointError, "does not authenticate: it was changed")

    def test_files_of_another_checkpoint_are_refused(self, work: Workspace) -> None:
        run(work)
        older, newer = sorted(RUN.glob("checkpoints/step-*"))[-2:]
        shutil.copy(older / "state-0", newer / "state-0")
        refused(work, CheckpointError, newer.name, "does not authenticate")

    def test_another_config_is_refused_with_the_difference(self, work: Workspace) -> None:
        run(work, identity={"train": {"seed": 7, "optimizer": {"lr": 0.01}}})
        words = "is of another run", "(train.optimizer.lr is 0.02 and was 0.01)"
        identity = {"train": {"seed": 7, "optimizer": {"lr": 0.02}}}
        refused(work, CheckpointError, *words, fingerprint="e" * 64, identity=identity)

    def test_what_killed_saves_left_goes_and_the_newest_and_best_stay(
        self, work: Workspace
    ) -> None:
        left = RUN / "checkpoints" / "step-00000009-killed"
        left.mkdir(parents=True)
        (left / "state-0").write_bytes(b"half")
        (STORED / left.name).mkdir(parents=True)
        (STORED / left.name / "state-0").write_bytes(b"half")
        run(work, checkpoint={"every_steps": 3, "keep": 2})
        names = sorted(path.name[:13] for path in RUN.glob("checkpoints/step-*"))
        stored = sorted(path.parent.name[:13] for path in STORED.glob(f"*/{MARKER}"))
        assert names == stored
        assert not list(STORED.glob("*killed/*"))
        assert names[-2:] == ["step-00000027", "step-00000030"]
        assert len(names) <= 3

    def test_a_store_that_refuses_leaves_the_one_on_disk(self, work: Workspace) -> None:
        STORED.parent.write_text("a file where the folder should be")
        words = "is whole on this disk and could not be placed in the store", "regions.eu.store"
        refused(work, CheckpointError, *words)
        assert [path.parent.name[:13] for path in RUN.glob(f"*/*/{MARKER}")] == ["step-00000010"]

    def test_export(self, work: Workspace) -> None:
        from pipeline.checkpoints import export_checkpoint, list_checkpoints

        config = Config.load()
        identity = {
            "manifest": json.loads(Path("artifacts/upload/eu.json").read_text())["version"],
            "train": {"model": config.train.model},
        }
        run(work, identity=identity)
        target = Path(".convoy/runs/run")
        target.parent.mkdir(parents=True)
        shutil.copytree(RUN, target)
        listed = list_checkpoints(config, work.path)
        assert [(one.step, one.on_disk, one.in_store) for one in listed][-1] == (30, True, True)
        assert sum(one.best for one in listed) == 1
        shutil.rmtree(target / "checkpoints")  # so from the store
        export_checkpoint(
            config, work.path, Path("out/model.safetensors"), run=None, step=30, best=False
        )
        assert Path("out/model.safetensors").read_bytes() == (RUN / WEIGHTS_FILE).read_bytes()


def load_and_save(path: str, settings: dict[str, Any]) -> tuple[int, list[float]]:
    """In a rank: load into a layout of the place names' model, and save from it; without anything
    to load, one step is taken first. The step that it is at, and what is drawn next."""
    import torch

    from training.checkpoint import Checkpoint, Checkpointer
    from training.optimization import Gradients, build_optimizers, take_step
    from training.parallel import build_mesh, parallelize
    from training.timing import StepTimer

    os.chdir(path)
    config = configure(**settings, optimizer={"name": "adamw"})
    spec = make_spec(Workspace(Path(path), {})).model_copy(update={"config": config})
    torch.manual_seed(len(settings))  # what is not loaded would be seen
    workload, mesh = places(), build_mesh(config.dims, torch.device("cpu"))
    model = parallelize(workload, workload.model(config.model), config, mesh)
    optimizers = build_optimizers(model.parts, config.optimizer)
    with Checkpointer(spec, spec.open_shards()[0], model.seed_after_start) as checkpoints:
        progress = checkpoints.load(model.parts, optimizers)
        if progress is None:
            model.forward_backward(*workload.collate(make_places(8, 1)), StepTimer())
            take_step(optimizers, 0.01)
            Gradients(model.parts).forget()
            progress = Checkpoint(step=1, cursor=16)
        drawn: list[float] = torch.rand(3).tolist()
        checkpoints.save(progress, model.parts, optimizers)
    return progress.step, drawn


def exported(work: Workspace) -> dict[str, Any]:
    """Model and optimiser of the newest checkpoint, by name."""
    from training.checkpoint import open_checkpoint
    from training.checkpoint_commit import CHECKPOINTS
    from training.checkpoint_files import CheckpointFiles
    from training.checkpoint_state import load_whole

    sealed, _ = make_spec(work).open_shards()
    files = CheckpointFiles(work.path / RUN / CHECKPOINTS, sealed, "run")
    with open_checkpoint(files, files.find()[-1]) as opened:
        return load_whole(opened.metadata, opened.open)


LAYOUTS: list[dict[str, Any]] = [
    {"dims": {"dp_replicate": 1, "tp": 2}},
    {
        "dims": {"dp_replicate": 1, "pp": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_worker": 2},
    },
    {"dims": {"dp_replicate": 2}},
    {"dims": {"dp_replicate": 1}},
    {"dims": {"dp_replicate": 1, "dp_shard": 2}},
]


def test_any_layout_loads_what_another_wrote(work: Workspace) -> None:
    import torch

    path = str(work.path)
    run_ranks(2, load_and_save, path, {"dims": {"dp_replicate": 1, "dp_shard": 2}})
    written = exported(work)
    assert any(name.startswith("optimizer.state.") for name in written)
    for settings in LAYOUTS:
        dims = settings["dims"]
        answers = run_ranks(max(dims.values()), load_and_save, path, settings)
        assert {step for step, _ in answers} == {1}
        found = exported(work)
        assert found.keys() == written.keys()
        assert not [name for name in written if not torch.equal(found[name], written[name])]
        # Ranks that split a layer draw alike, all others for themselves.
        num_streams = len({tuple(drawn) for _, drawn in answers})
        assert num_streams == (1 if "tp" in dims else len(answers))
