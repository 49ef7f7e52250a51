"""The plots of the report page, each with what it says in words."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.findings import Findings, LoggedStep
from pipeline.plots import describe_curve, draw_curve, draw_stack, draw_timeline
from pipeline.speed import PHASES
from training.goodput import Goodput, Stretch


@dataclass(frozen=True)
class Plot:
    """A drawn curve, and what it says in words."""

    title: str
    svg: Markup
    caption: str


def draw_plots(findings: Findings) -> tuple[Plot, ...]:
    """Loss, learning rate and throughput over the logged steps."""
    lines = findings.steps
    if not lines:
        return ()
    steps = [line.step for line in lines]
    incidents = findings.training.incidents if findings.training else ()
    restarts = [incident.last_step for incident in incidents]
    step_seconds = statistics.median(line.step_seconds for line in lines)
    waiting = sum(line.data_wait_seconds for line in lines) / sum(x.step_seconds for x in lines)
    curves = (
        ("loss", "Training loss", "loss, mean of a batch", [x.loss for x in lines], ""),
        ("lr", "Learning rate", "learning rate", [x.lr for x in lines], ""),
        (
            "throughput",
            "Throughput",
            "samples/s, all workers",
            [x.samples_per_second for x in lines],
            f" The median step took {step_seconds * 1000:.3g} ms; "
            f"{100 * waiting:.1f} % of the time went into waiting for data.",
        ),
    )
    plots = tuple(
        Plot(
            title=title,
            svg=Markup(draw_curve(name, steps, values, unit, restarts)),
            caption=describe_curve(steps, values) + note,
        )
        for name, title, unit, values, note in curves
    )
    if all(line.has_split for line in lines):
        plots = (*plots, _draw_split(lines))
    training = findings.training
    if training and training.stretches and training.goodput:
        plots = (*plots, _draw_time(training.stretches, training.goodput))
    return plots


def _draw_time(stretches: Sequence[Stretch], goodput: Goodput) -> Plot:
    parts = goodput.model_dump()
    named = ", ".join(
        f"{name.removesuffix('_seconds').replace('_', ' ')} {seconds:.1f} s"
        for name, seconds in parts.items()
        if seconds >= 0.05
    )
    return Plot(
        title="Where the time went",
        svg=Markup(draw_timeline("timeline", stretches)),
        caption=f"Of {goodput.total_seconds:.1f} s, {100 * goodput.ratio:.0f} % moved the training "
        f"on: {named}.",
    )


def _draw_split(lines: Sequence[LoggedStep]) -> Plot:
    parts = {
        shown: [1000 * getattr(line, field) for line in lines] for field, shown in PHASES.items()
    }
    totals = {shown: sum(values) for shown, values in parts.items()}
    largest = max(totals, key=lambda shown: totals[shown])
    share = totals[largest] / sum(totals.values())
    return Plot(
        title="Where a step goes",
        svg=Markup(draw_stack("split", [line.step for line in lines], parts, "ms a step")),
        caption=f"Mean of the workers. The largest part is {largest}, {100 * share:.0f} %.",
    )
