"""The canonical example: the place names partitioned among eight workers with a copy each.

The real loop over sealed shards. The gradients are averaged after each batch, the copies stay the
same to the bit, and what they learn is what one process learns from the joined batches.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from pipeline import workspace
from pipeline.config import Config
from pipeline.stages import STAGES
from tests.training.ranks import run_ranks
from tests.workspaces import ROOT
from training.config import TrainConfig
from training.spec import STEPS_FILE, TrainSpec
from training.workload import load_workload

STEPS = 4


class Trained(NamedTuple):
    """What one rank saw."""

    batches: list[list[str]]
    """The names of each step's places, in order."""
    gradients: list[str]
    """Digests of all gradients, before each step of the optimiser."""
    parameters: list[str]
    """Digests of all parameters, before the first step and after each."""
    lines: list[dict[str, float]]
    """Steps as they were logged; of rank 0."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the world's largest places, sealed and placed."""
    path = tmp_path_factory.mktemp("places")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    params["ingest"]["params"]["min_population"] = 1_000_000
    params["train"] |= {"steps": STEPS, "global_batch": 40, "log_every_steps": 1}
    params["train"]["model"] |= {"width": 16, "num_heads": 2, "num_layers": 2}
    (path / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    (path / "examples").symlink_to(ROOT / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for stage in ("ingest", "shard", "upload"):
            STAGES[stage](Config.load())
    return path


def train_here(spec: TrainSpec) -> Trained:
    """One rank of the loop, watched from outside it."""
    import torch.distributed as dist
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    from training.trainer import train

    workload = load_workload(spec.workload, spec.root)
    seen = Trained([], [], [], [])
    collate = workload.module.collate

    def note_names(records: Any) -> Any:
        seen.batches.append([record["name"] for record in records])
        return collate(records)

    def note_gradients(optimizer: Any, *_: Any) -> None:
        if not seen.parameters:
            seen.parameters.append(digest(parameters_of(optimizer)))
        seen.gradients.append(digest(p.grad for p in parameters_of(optimizer)))

    def note_parameters(optimizer: Any, *_: Any) -> None:
        seen.parameters.append(digest(parameters_of(optimizer)))

    workload.module.collate = note_names  # type: ignore[attr-defined]
    register_optimizer_step_pre_hook(note_gradients)
    register_optimizer_step_post_hook(note_parameters)
    train(spec, workload)
    if dist.get_rank() == 0:
        seen.lines.extend(map(json.loads, (spec.run_directory / STEPS_FILE).open()))
    # Each rank rehearses on two records before the first step.
    return seen._replace(batches=seen.batches[-STEPS:])


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def digest(tensors: Iterable[Any]) -> str:
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().numpy().tobytes())
    return content.hexdigest()


def train_by(num_workers: int, path: Path) -> list[Trained]:
    config = Config.load(path / "params.yaml")
    section = config.train.model_dump() | {"dims": {"dp_replicate": num_workers}}
    directory = path / f"run-{num_workers}"
    directory.mkdir()
    spec = TrainSpec(
        root=path,
        workload=config.workload.module,
        config=TrainConfig.model_validate(section),
        primary="bits_per_byte",
        manifest=path / workspace.MANIFEST,
        region=config.site.model_copy(
            update={
                "store": f"file:{path}/.convoy/stores/eu",
                "wrapping_key": f"file:{path}/.convoy/keys/eu.key",
            }
        ),
        residency=config.residency,
        access_log=path / workspace.ACCESS_LOG,
        run_directory=directory,
        fingerprint="f" * 64,
        tracking_uri="",
        mlflow_run_id="",
    )
    found: list[Trained] = run_ranks(num_workers, train_here, spec)
    return found


def test_eight_copies_learn_what_one_process_learns(places: Path) -> None:
    eight = train_by(8, places)
    [one] = train_by(1, places)

    # Every batch is partitioned among the workers.
    for step in range(STEPS):
        parts = [worker.batches[step] for worker in eight]
        assert [len(part) for part in parts] == [5] * 8
        assert [name for part in parts for name in part] == one.batches[step]

    # Copies start the same, get the same averaged gradient, and are the same to the end.
    assert {len(worker.parameters) for worker in eight} == {STEPS + 1}
    assert {tuple(worker.parameters) for worker in eight} == {tuple(eight[0].parameters)}
    assert {tuple(worker.gradients) for worker in eight} == {tuple(eight[0].gradients)}
    assert len(set(eight[0].parameters)) == STEPS + 1
    assert eight[0].parameters[0] == one.parameters[0]

    # Sums of eight parts are rounded in another order than those of one batch: no more than that.
    for ours, alone in zip(eight[0].lines, one.lines, strict=True):
        assert ours["step"] == alone["step"]
        assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert len(one.lines) == STEPS
