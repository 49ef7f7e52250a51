"""`make parity`: every point of the space of degrees against one process, with its tolerance.

A point is what would be written under `train` in params.yaml, and nothing else: model, data and
code are the same everywhere. The steps are those of the trainer: parallelize(), forward_backward(),
Gradients, take_step(). Prints a table, writes it into docs/parity.md, and fails where a number is
out of its tolerance.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.training.parallel_steps import Steps, configure, places, take_steps
from tests.training.ranks import RankFailed, run_ranks
from training.config import TrainConfig

PAGE = Path(__file__).parent.parent / "docs" / "parity.md"
_POINT_SECONDS = 1200
"""Of one point, compilers at work included."""
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "grad_clip": 1.0},
    "adamw": {"name": "adamw", "lr": 0.002, "weight_decay": 0.1, "grad_clip": 1.0},
}


@dataclass(frozen=True)
class Point:
    """One way to train: a name, and what params.yaml says under `train`."""

    name: str
    settings: dict[str, Any]

    @property
    def is_low(self) -> bool:
        """Whether layers compute in bfloat16."""
        return self.settings.get("precision") == "bfloat16"

    def configure(self, optimizer: str) -> TrainConfig:
        return configure(**self.settings, optimizer=OPTIMIZERS[optimizer])


class Difference(NamedTuple):
    """How far a point is from one process."""

    loss: float
    """Largest of the steps, relative."""
    norm: float
    """Of the gradient before it is clipped: largest of the steps, relative."""
    gradient: float
    """Of the last step, clipped, all parameters together: norm of the difference by the norm."""
    parameters: float
    """After the last step, in the same measure, of what the steps have changed."""


TOLERANCES: dict[tuple[str, str], Difference] = {
    # A float32 has 24 bits, 6e-8: sums over samples, layers and ranks are rounded in another order.
    ("float32", "sgd"): Difference(loss=1e-6, norm=2e-6, gradient=2e-6, parameters=1e-5),
    # AdamW divides a gradient by its own size: where it is nearly nothing, its rounding decides the
    # direction of a whole step.
    ("float32", "adamw"): Difference(loss=1e-6, norm=2e-6, gradient=1e-5, parameters=1e-4),
    # A bfloat16 has 8 bits, 4e-3. One process computes in bfloat16 too, but rounds in other places.
    ("bfloat16", "sgd"): Difference(loss=4e-3, norm=1e-2, gradient=4e-2, parameters=4e-2),
    ("bfloat16", "adamw"): Difference(loss=4e-3, norm=1e-2, gradient=4e-2, parameters=2e-1),
}


def dims(**degrees: int) -> dict[str, Any]:
    return {"dims": {"dp_replicate": 1} | degrees}


def pipeline(schedule: str, stages_per_worker: int = 1) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule, "stages_per_worker": stages_per_worker}}


SEQUENCE, LOSS = {"sequence_parallel": True}, {"loss_parallel": True}
INTERLEAVED = pipeline("interleaved_1f1b", 2)

DEGREES = (
    Point("one process, again", dims()),
    Point("DDP 2", dims(dp_replicate=2)),
    Point("DDP 4", dims(dp_replicate=4)),
    Point("DDP 8", dims(dp_replicate=8)),
    Point("FSDP 2", dims(dp_shard=2)),
    Point("FSDP 4", dims(dp_shard=4)),
    Point("HSDP 2x2", dims(dp_replicate=2, dp_shard=2)),
    Point("TP 2", dims(tp=2)),
    Point("TP 2, sequence", dims(tp=2) | SEQUENCE),
    Point("TP 2, loss", dims(tp=2) | LOSS),
    Point("TP 2, sequence, loss", dims(tp=2) | SEQUENCE | LOSS),
    Point("TP 4, sequence, loss", dims(tp=4) | SEQUENCE | LOSS),
    Point("PP 2, GPipe", dims(pp=2) | pipeline("gpipe")),
    Point("PP 2, 1F1B", dims(pp=2)),
    Point("PP 4, 1F1B", dims(pp=4)),
    Point("PP 2, interleaved", dims(pp=2) | INTERLEAVED),
    Point("PP 2, interleaved zero bubble", dims(pp=2) | pipeline("interleaved_zero_bubble", 2)),
    Point("PP 2, ZBV zero bubble", dims(pp=2) | pipeline("zbv_zero_bubble", 2)),
    Point("DDP x TP", dims(dp_replicate=2, tp=2)),
    Point("DDP x TP, sequence, loss", dims(dp_replicate=2, tp=2) | SEQUENCE | LOSS),
    Point("DDP x PP, 1F1B", dims(dp_replicate=2, pp=2)),
    Point("DDP x PP, interleaved", dims(dp_replicate=2, pp=2) | INTERLEAVED),
    Point("FSDP x TP", dims(dp_shard=2, tp=2)),
    Point("FSDP x TP, sequence, loss", dims(dp_shard=2, tp=2) | SEQUENCE | LOSS),
    Point("FSDP x PP, 1F1B", dims(dp_shard=2, pp=2)),
    Point("FSDP x PP, interleaved", dims(dp_shard=2, pp=2) | INTERLEAVED),
    Point("TP x PP, 1F1B", dims(tp=2, pp=2)),
    Point("TP x PP, sequence, loss", dims(tp=2, pp=2) | SEQUENCE | LOSS),
    Point("HSDP x TP 2x2x2", dims(dp_replicate=2, dp_shard=2, tp=2)),
    Point("HSDP x PP 2x2x2", dims(dp_replicate=2, dp_shard=2, pp=2)),
    Point("DDP x TP x PP 2x2x2", dims(dp_replicate=2, tp=2, pp=2)),
    Point("FSDP x TP x PP 2x2x2", dims(dp_shard=2, tp=2, pp=2) | SEQUENCE | LOSS),
)
_VARIED = {
    "one process": dims(),
    "DDP 2": dims(dp_replicate=2),
    "FSDP 2": dims(dp_shard=2),
    "HSDP 2x2": dims(dp_replicate=2, dp_shard=2),
    "TP 2": dims(tp=2),
    "PP 2, 1F1B": dims(pp=2),
    "DDP x TP": dims(dp_replicate=2, tp=2),
    "FSDP x TP x PP 2x2x2": dims(dp_shard=2, tp=2, pp=2),
}
VARIANTS = tuple(
    Point(f"{name}; {variant}", degrees | settings)
    for variant, settings, among in (
        ("activation checkpointing", {"activation_checkpointing": "full"}, set(_VARIED)),
        # A pipeline accumulates over its microbatches already, and refuses this.
        ("accumulate 2", {"accumulate": 2}, {n for n in _VARIED if "PP" not in n}),
        ("bfloat16", {"precision": "bfloat16"}, set(_VARIED)),
        ("compile", {"compile": True}, {"one process", "DDP 2", "FSDP 2", "TP 2"}),
    )
    for name, degrees in _VARIED.items()
    if name in among
)


def take_all_steps(configs: Sequence[TrainConfig]) -> list[Steps]:
    """In each rank of one process group: one training after another."""
    return [take_steps(config) for config in configs]


def build_parameters() -> dict[str, Any]:
    """The model before the first step."""
    import torch

    config = configure()
    torch.manual_seed(config.seed)
    model = places().model(config.model)
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def run_point(point: Point, optimizers: Iterable[str]) -> dict[str, Steps]:
    """What the ranks gave together, by optimiser: stages hold parameters of their own."""
    names = list(optimizers)
    configs = [point.configure(name) for name in names]
    ranks = run_ranks(
        configs[0].dims.world_size, take_all_steps, configs, timeout_seconds=_POINT_SECONDS
    )
    return {name: join([rank[number] for rank in ranks]) for number, name in enumerate(names)}


def join(ranks: Sequence[Steps]) -> Steps:
    """Raises AssertionError unless ranks that hold the same tell the same, to the bit."""
    whole = Steps(ranks[0].losses, ranks[0].norms, {}, {})
    for rank in ranks:
        assert (rank.losses, rank.norms) == (whole.losses, whole.norms)
        for mine, all_of_them in (
            (rank.gradients, whole.gradients),
            (rank.parameters, whole.parameters),
        ):
            for name, value in mine.items():
                assert np.array_equal(all_of_them.setdefault(name, value), value), name
    return whole


def compare(ours: Steps, reference: Steps, start: dict[str, Any]) -> Difference:
    """start: the parameters before the first step."""
    assert ours.gradients.keys() == reference.gradients.keys() == start.keys()
    return Difference(
        loss=_furthest(ours.losses, reference.losses),
        norm=_furthest(ours.norms, reference.norms),
        gradient=_distance(ours.gradients, reference.gradients, reference.gradients),
        parameters=_distance(
            ours.parameters,
            reference.parameters,
            {name: reference.parameters[name] - value for name, value in start.items()},
        ),
    )


def _furthest(ours: Sequence[float], reference: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, reference, strict=True))


def _distance(ours: dict[str, Any], reference: dict[str, Any], scale: dict[str, Any]) -> float:
    """Norm of the difference by the norm of `scale`, each of all tensors together."""
    apart = sum(float(np.square(ours[n] - reference[n], dtype=np.float64).sum()) for n in ours)
    whole = sum(float(np.square(value, dtype=np.float64).sum()) for value in scale.values())
    return float(np.sqrt(apart / whole))


class References:
    """One process, for each optimiser and precision; computed once."""

    def __init__(self, optimizers: Iterable[str]) -> None:
        self._optimizers = list(optimizers)
        self._found: dict[bool, dict[str, Steps]] = {}
        [self.start] = run_ranks(1, build_parameters)

    def find(self, point: Point) -> dict[str, Steps]:
        if point.is_low not in self._found:
            low = {"precision": "bfloat16"} if point.is_low else {}
            self._found[point.is_low] = run_point(Point("", dims() | low), self._optimizers)
        return self._found[point.is_low]


def measure(point: Point, references: References) -> dict[str, Difference]:
    """By optimiser."""
    reference = references.find(point)
    return {
        name: compare(ours, reference[name], references.start)
        for name, ours in run_point(point, reference).items()
    }


def is_within(point: Point, optimizer: str, found: Difference) -> bool:
    allowed = TOLERANCES["bfloat16" if point.is_low else "float32", optimizer]
    return all(x <= y for x, y in zip(found, allowed, strict=True))


def write_page(page: Path, lines: Iterable[str]) -> None:
    """Put a table between the marks of the page, in place of the one that was there."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{page} has no marks for the table"
    assert end, f"{page} has no marks for the table"
    table = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


def read_rows(page: Path) -> dict[str, str]:
    """The rows of the page's table, by point."""
    table = page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def main(only: str = "") -> None:
    """Print the table and write it; exit 1 when a point is out of its tolerance.

    only: of points whose name contains it; the page's rows of the others stay.
    """
    columns = [f"{name}: {field}" for name in OPTIMIZERS for field in Difference._fields]
    lines = [f"| point | {' | '.join(columns)} | holds |", "|---" * (len(columns) + 2) + "|"]
    references = References(OPTIMIZERS)
    kept = read_rows(PAGE)
    all_hold = True
    for point in (*DEGREES, *VARIANTS):
        if only not in point.name:
            lines += [kept[point.name]] if point.name in kept else []
            continue
        try:
            found = measure(point, references)
        except RankFailed as error:
            print(f"{point.name} failed: {error}", flush=True)
            lines.append(f"| {point.name} |{'  |' * len(columns)} **failed** |")
            all_hold = False
            continue
        holds = all(is_within(point, name, each) for name, each in found.items())
        all_hold &= holds
        cells = [f"{value:.0e}" if value else "0" for each in found.values() for value in each]
        verdict = "yes" if holds else "**NO**"
        lines.append(f"| {point.name} | {' | '.join(cells)} | {verdict} |")
        print(f"{point.name:52}", *(f"{cell:7}" for cell in cells), verdict, flush=True)
    write_page(PAGE, lines)
    if not all_hold:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
