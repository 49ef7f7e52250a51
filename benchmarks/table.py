"""Rows of a benchmark: printed as a table, and written to artifacts/benchmarks/NAME.json."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

OUTPUT = Path("artifacts/benchmarks")


@dataclass(frozen=True)
class Row:
    """One claim: ours against the reference, and whether the target holds."""

    case: str
    ours: float
    reference: float
    ratio: float
    target: str
    holds: bool


def publish(name: str, unit: str, rows: Sequence[Row]) -> None:
    """Show the rows and write them."""
    table = Table("case", f"ours ({unit})", f"reference ({unit})", "ratio", "target", "holds")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.ours:.3f}",
            f"{row.reference:.3f}",
            f"{row.ratio:.3f}",
            row.target,
            ("yes" if row.holds else "NO") if row.target else "",
        )
    Console(width=120).print(table)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    print(path)
