"""Held-out records scored by many ranks: the sums of one process, to the bit, and each once."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline import workspace
from pipeline.config import Config
from tests.pipeline.conftest import edit
from tests.training.ranks import run_ranks
from tests.workspaces import Workspace
from training.scoring import load_weights, score_model, score_part, split_batches
from training.spec import EvaluationSpec
from training.workload import Sums, load_workload

MODULE = Path("toy_workload.py")


def prepare(work: Workspace, **more: Any) -> EvaluationSpec:
    """Untrained weights, and a workload whose metric has as many digits as a float can hold."""
    from safetensors.torch import save_model

    edit(
        MODULE,
        '"accuracy": (float(hits), ',
        '"loss": (float(loss(output, target).item()) * 0.1, float(len(target))), '
        '"accuracy": (float(hits), ',
    )
    config = Config.load()
    workload = load_workload(config.workload.module, work.path)
    save_model(workload.model({}), str(work.path / "weights"))
    directory = work.path / "evaluation"
    directory.mkdir()
    return EvaluationSpec(
        root=work.path,
        workload=config.workload.module,
        manifest=work.path / workspace.MANIFEST,
        region=config.site,
        residency=config.residency,
        access_log=work.path / workspace.ACCESS_LOG,
        run_directory=directory,
        mlflow_run_id="",
        weights=work.path / "weights",
        model={},
        batch=4,
        world_size=1,
        sharded=False,
        restarts=0,
    ).model_copy(update=more)


def score_alone(spec: EvaluationSpec) -> list[Sums]:
    """What one process finds in each shard."""
    workload = load_workload(spec.workload, spec.root)
    model = load_weights(workload, spec.weights, spec.model)
    sealed, shards = spec.open_shards()
    return [score_model(workload, model, list(sealed.open(x)), spec.batch) for x in shards]


def score_in_rank(spec: EvaluationSpec) -> None:
    workload = load_workload(spec.workload, spec.root)
    if not spec.sharded:  # else some pass a batch more, for the others' sake
        _note_numbers(workload, spec.root)
    score_part(spec, workload)
    spec.open_log().close()


def _note_numbers(workload: Any, root: Path) -> None:
    import torch.distributed as dist

    collate = workload.module.collate

    def noting(records: Any) -> Any:
        with (root / f"numbers-{dist.get_rank()}").open("a") as file:
            file.writelines(f"{record['number']}\n" for record in records)
        return collate(records)

    workload.module.collate = noting


def score_by_ranks(spec: EvaluationSpec, num_ranks: int) -> list[list[Sums]]:
    run_ranks(num_ranks, score_in_rank, spec)
    scores: list[list[Sums]] = json.loads((spec.run_directory / "scores.json").read_text())
    return scores


def add_by_hand(parts: list[Sums]) -> dict[str, list[float]]:
    return {name: [sum(part[name][i] for part in parts) for i in (0, 1)] for name in parts[0]}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("num_ranks", [5, 8])
def test_ranks_find_what_one_process_finds(work: Workspace, num_ranks: int, sharded: bool) -> None:
    spec = prepare(work, sharded=sharded)
    found = score_by_ranks(spec, num_ranks)
    alone = [{k: list(v) for k, v in sums.items()} for sums in score_alone(spec)]
    assert [add_by_hand(parts) for parts in found] == alone
    assert len({sums["loss"][0] for sums in alone}) == len(alone) > 1
    assert sum(map(len, found)) % num_ranks  # it does not divide


def test_no_record_is_dropped_or_doubled(work: Workspace) -> None:
    spec = prepare(work)
    score_by_ranks(spec, 5)
    sealed, shards = spec.open_shards()
    held_out = Counter(str(row["number"]) for shard in shards for row in sealed.open(shard))
    parts = [path.read_text().split() for path in sorted(work.path.glob("numbers-*"))]
    assert sum(map(Counter, parts), Counter()) == held_out
    assert set(held_out.values()) == {1}
    assert len(set(map(len, parts))) > 1


@pytest.mark.parametrize("sharded", [False, True])
def test_more_ranks_than_batches(work: Workspace, sharded: bool) -> None:
    spec = prepare(work, batch=1000, sharded=sharded)
    found = score_by_ranks(spec, 3)
    assert [parts[0]["accuracy"][1] for parts in found] == [
        shard.num_records for shard in spec.open_shards()[1]
    ]


def test_a_batch_holds_records_of_one_shard() -> None:
    assert split_batches([5, 0, 2], 2) == [(0, 0, 2), (0, 2, 4), (0, 4, 5), (2, 0, 2)]
