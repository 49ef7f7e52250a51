"""Curves of a training run as inline SVG that takes its font and colours from the page.

Drawn by matplotlib in placeholder colours, which become CSS variables: one drawing is crisp and
readable in light, in dark and on paper. Equal numbers give equal bytes.
"""

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from training.goodput import Stretch

# Placeholder colours, and the page's CSS variables that take their place.
_VARIABLES = {
    "#010101": "--ink",
    "#020202": "--muted",
    "#030303": "--line",
    "#040404": "--curve",
    "#050505": "--warn",
    "#060606": "--part-1",
    "#070707": "--part-2",
    "#080808": "--part-3",
    "#090909": "--part-4",
    "#0a0a0a": "--part-5",
    "#0b0b0b": "--part-6",
    "#0c0c0c": "--part-7",
}
_INK, _MUTED, _LINE, _CURVE, _WARN, *_PARTS = _VARIABLES

_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 10.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "figure.facecolor": "none",
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
}


def draw_curve(
    name: str,
    steps: Sequence[int],
    values: Sequence[float],
    unit: str,
    restarts: Sequence[int] = (),
) -> str:
    """A curve over steps as an SVG element for an HTML page.

    `name` makes its ids unique in the page; `unit` labels the y axis; `restarts` are steps after
    which the workers were started again, marked by dashed lines. A value that is not finite is a
    gap.
    """
    finite = [value if math.isfinite(value) else math.nan for value in values]

    def draw(axes: Any) -> None:
        for step in restarts:
            axes.axvline(step, color=_WARN, linewidth=1, linestyle=(0, (3, 3)))
        # A single point has no line to be seen by.
        axes.plot(steps, finite, color=_CURVE, linewidth=1.7, marker="o" if len(steps) < 3 else "")

    return _draw(name, unit, f"{unit}: {describe_curve(steps, values)}", draw)


def draw_stack(
    name: str, steps: Sequence[int], parts: Mapping[str, Sequence[float]], unit: str
) -> str:
    """Parts of a whole over steps, one on the other, as an SVG element; at most seven."""
    means = ", ".join(f"{part} {sum(v) / len(v):.3g}" for part, v in parts.items())

    def draw(axes: Any) -> None:
        # A single point would have no area to be seen by.
        ends = [steps[0] - 1, *steps] if len(steps) == 1 else steps
        values = [[v[0], *v] if len(steps) == 1 else v for v in parts.values()]
        axes.stackplot(ends, *values, labels=list(parts), colors=_PARTS, linewidth=0)
        handles, labels = axes.get_legend_handles_labels()
        axes.figure.legend(
            handles, labels, frameon=False, loc="outside lower center", ncols=2, fontsize=9
        )
        axes.set_ylim(bottom=0)

    return _draw(name, unit, f"{unit}, means: {means}", draw)


def draw_timeline(name: str, stretches: Sequence[Stretch]) -> str:
    """What a run did over its seconds, as an SVG element: a row for each kind of stretch, and the
    steps that were done again apart."""
    rows = ("starting, ending", "training", "lost", "recovering")
    colors = dict(zip(rows, (_MUTED, _CURVE, _WARN, _PARTS[3]), strict=True))
    spans: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
    for stretch in stretches:
        if stretch.kind == "training":
            lost = stretch.lost_seconds
            spans["training"].append((stretch.begins, stretch.seconds - lost))
            spans["lost"] += [(stretch.ends - lost, lost)] if lost else []
        else:
            row = "recovering" if stretch.kind == "recovering" else "starting, ending"
            spans[row].append((stretch.begins, stretch.seconds))

    def draw(axes: Any) -> None:
        for place, row in enumerate(rows):
            axes.broken_barh(spans[row], (place - 0.35, 0.7), facecolor=colors[row])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), rows)

    sums = ", ".join(f"{row} {sum(s for _, s in spans[row]):.1f} s" for row in rows)
    return _draw(name, "", sums, draw, x="seconds", is_named=True)


def _draw(
    name: str,
    unit: str,
    description: str,
    draw: Callable[[Any], None],
    x: str = "step",
    is_named: bool = False,
) -> str:
    """is_named: y has names and not numbers."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    overrides: dict[str, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.style.context(["default", overrides]):
        figure = Figure(figsize=(4.6, 2.7), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if not is_named:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        # Plain text: matplotlib's own numbers are set glyph by glyph, in its own font.
        for axis in (axes.xaxis,) if is_named else (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        drawing = io.StringIO()
        figure.savefig(
            drawing,
            format="svg",
            metadata={"Creator": None, "Date": None, "Format": None, "Type": None},
        )
    return _inline(drawing.getvalue(), name, description)


def describe_curve(steps: Sequence[int], values: Sequence[float]) -> str:
    """The curve in words, for those who do not see it."""
    known = [point for point in zip(steps, values, strict=True) if math.isfinite(point[1])]
    if not known:
        return f"No number in {len(steps)} logged steps."
    (first_step, first), (last_step, last) = known[0], known[-1]
    low, high = min(value for _, value in known), max(value for _, value in known)
    return (
        f"{first:.4g} at step {first_step:,}, {last:.4g} at step {last_step:,}; "
        f"between {low:.4g} and {high:.4g}."
    )


def _inline(document: str, name: str, description: str) -> str:
    """The document's <svg> element: ids of its own, colours of the page, scaled by the page."""
    body = document[document.index("<svg ") :]
    # A style element of an inline SVG would reach the whole page.
    body = re.sub(r"<style[^>]*>.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\1{name}-", body)
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)
    for color, variable in _VARIABLES.items():
        body = body.replace(color, f"var({variable})")
    box = re.search(r'viewBox="[^"]*"', body)
    assert box is not None  # matplotlib always writes one
    start = f'<svg role="img" aria-label="{html.escape(description)}" {box[0]}>'
    return start + body[body.index(">") + 1 :].rstrip()
