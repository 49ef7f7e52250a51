"""`convoy init NAME --from FILE`: a workspace that works, from a raw input file."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.prompt import Prompt

from pipeline.inspection import SourceSummary, inspect_source
from pipeline.scaffold import check_name
from pipeline.starter import create_workspace


def main(options: argparse.Namespace) -> int:
    here = Path.cwd()
    check_name(here, options.name)
    field: str | None = options.jurisdiction_field
    jurisdiction: str | None = options.jurisdiction
    if field is None and jurisdiction is None and sys.stdin.isatty():
        field, jurisdiction = _ask(inspect_source(options.source))
    created = create_workspace(
        here,
        options.name,
        options.source,
        jurisdiction_field=field,
        jurisdiction=jurisdiction,
        target=options.target,
        train_in=options.train_in,
        group=options.group,
    )
    for line in (*created.found, "", *created.next_steps):
        print(line)
    return 0


def _ask(summary: SourceSummary) -> tuple[str | None, str | None]:
    """The field that says whose law binds a record, or one jurisdiction for all of them."""
    console = Console(stderr=True, highlight=False)
    console.print(f"{summary.path}: {summary.num_records:,} records of {summary.list_names()}")
    for name in summary.likely_jurisdictions:
        values = summary.find(name, "jurisdiction").values[:5]
        shown = ", ".join(f"{value} ({count})" for value, count in values)
        console.print(f"  {name} may say whose law binds a record: {shown}")
    answer = Prompt.ask(
        "The field that does (or =EU, for one jurisdiction of all records)",
        default=next(iter(summary.likely_jurisdictions), None),
        console=console,
    )
    if answer is not None and answer.startswith("="):
        return None, answer.removeprefix("=").strip()
    return answer, None
