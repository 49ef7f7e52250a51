"""`convoy init NAME --from FILE`: a workspace that works, from a raw input file."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.prompt import Prompt

from pipeline.errors import PipelineError
from pipeline.inspection import SourceSummary, inspect_source
from pipeline.starter import create_workspace


def main(options: argparse.Namespace) -> int:
    field: str | None = options.jurisdiction_field
    jurisdiction: str | None = options.jurisdiction
    if field is None and jurisdiction is None:
        summary = inspect_source(options.source)
        if not sys.stdin.isatty():
            raise PipelineError(
                f"{options.source}: say whose law binds its records: --jurisdiction-field FIELD or "
                f"--jurisdiction J. {_describe(summary)}"
            )
        field, jurisdiction = _ask(summary)
    created = create_workspace(
        Path.cwd(),
        options.name,
        options.source,
        jurisdiction_field=field,
        jurisdiction=jurisdiction,
        target=options.target,
        train_in=options.train_in,
    )
    for line in (*created.found, "", *created.next_steps):
        print(line)
    return 0


def _describe(summary: SourceSummary) -> str:
    likely = summary.likely_jurisdictions
    return f"Its fields: {', '.join(field.name for field in summary.fields)}" + (
        f"; likely: {', '.join(likely)}" if likely else ""
    )


def _ask(summary: SourceSummary) -> tuple[str | None, str | None]:
    """The field that holds the jurisdiction, or one jurisdiction for all records."""
    console = Console(stderr=True)
    console.print(f"{summary.path}: {summary.num_records:,} records ({summary.format})")
    console.print(_describe(summary), highlight=False)
    names = [field.name for field in summary.fields]
    likely = summary.likely_jurisdictions
    answer = Prompt.ask(
        "Which field says whose law binds a record? A name, or =J for one jurisdiction J for all",
        default=likely[0] if likely else None,
        console=console,
    )
    if answer is not None and answer.startswith("="):
        return None, answer[1:]
    if answer not in names:
        raise PipelineError(f"{summary.path}: there is no field '{answer}'. {_describe(summary)}")
    return answer, None
