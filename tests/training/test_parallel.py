"""Degrees compute what one process computes; what cannot is refused by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.training.parallel_steps import Steps, configure, take_steps
from tests.training.ranks import run_ranks
from training.errors import WorkloadError

INTERLEAVED = {"schedule": "interleaved_1f1b", "stages_per_worker": 2}
ZERO_BUBBLE = {"schedule": "zbv_zero_bubble", "stages_per_worker": 2}


@pytest.fixture(scope="module")
def alone() -> Steps:
    """One process, whose gradient is clipped in every step."""
    steps: Steps = run_ranks(1, take_steps, configure())[0]
    assert min(steps.norms) > 1.0
    return steps


def dims(**degrees: int) -> dict[str, int]:
    return {"dp_replicate": 1} | degrees


def furthest(ranks: list[Steps], reference: Mapping[str, Any], what: str) -> float:
    """The largest difference to the reference of any number in any rank; all names are there."""
    assert {name for rank in ranks for name in getattr(rank, what)} == reference.keys()
    return max(
        float(np.abs(value - reference[name]).max())
        for rank in ranks
        for name, value in getattr(rank, what).items()
    )


# Alone they say as much as all: what other points add is in `make parity`.
POINTS: dict[str, dict[str, Any]] = {
    "ddp": {"dims": dims(dp_replicate=2), "accumulate": 3},  # of unequal sizes
    "fsdp": {"dims": dims(dp_shard=2), "activation_checkpointing": "full"},
    "fsdp accumulates": {"dims": dims(dp_shard=2), "accumulate": 3},
    "hsdp": {"dims": dims(dp_replicate=2, dp_shard=2)},
    "tp": {"dims": dims(tp=2)},
    "tp, sequence, loss": {
        "dims": dims(tp=2),
        "sequence_parallel": True,
        "loss_parallel": True,
    },
    "pp": {"dims": dims(pp=2)},
    "ddp and tp": {"dims": dims(dp_replicate=2, tp=2), "accumulate": 2},
    "fsdp and pp, backward in halves": {"dims": dims(dp_shard=2, pp=2), "pipeline": ZERO_BUBBLE},
    "2x2x2": {
        "dims": dims(dp_shard=2, tp=2, pp=2),
        "sequence_parallel": True,
        "loss_parallel": True,
        "pipeline": INTERLEAVED,
    },
}


@pytest.mark.parametrize("name", POINTS)
def test_equals_one_process(alone: Steps, name: str) -> None:
    """Lengths of batches differ by step, the gradient is clipped, and losses are of about 25."""
    config = configure(**POINTS[name])
    ranks = run_ranks(config.dims.world_size, take_steps, config)
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=1e-6)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-6)
        assert rank.norms == ranks[0].norms  # bitwise: what is decided by them is agreed
    assert furthest(ranks, alone.gradients, "gradients") < 2e-6
    assert furthest(ranks, alone.parameters, "parameters") < 2e-7


def _forget_norms() -> str:
    """Splits sequences, and leaves the norms of the layers out of the plan."""
    from torch.distributed.tensor.parallel import SequenceParallel

    from examples import gpt

    whole_plan = gpt.tp_plan

    def forgetful(
        model: gpt.GPT, degree: int, *, sequence_parallel: bool = False, loss_parallel: bool = False
    ) -> dict[str, Any]:
        plan = whole_plan(
            model, degree, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel
        )
        own = NormOfPart()
        return {
            name: own if isinstance(style, SequenceParallel) and "layers" in name else style
            for name, style in plan.items()
        }

    class NormOfPart(SequenceParallel):
        def _apply(self, module: Any, device_mesh: Any) -> Any:
            """Leave the module as it is: its output is a part of the sequence, and plain."""
            return module

    gpt.tp_plan = forgetful
    config = configure(dims=dims(tp=2), sequence_parallel=True)
    try:
        take_steps(config)
    except WorkloadError as error:
        return str(error)
    return "nothing"


def test_a_norm_that_the_plan_forgets_is_found_at_the_first_step() -> None:
    said = run_ranks(2, _forget_norms)
    assert "tp_plan() leaves out layers.0.attention_norm.weight" in said[0]
    assert said[0] == said[1]
