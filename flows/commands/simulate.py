"""`convoy simulate`: training while nodes die, stop, lose their links, fill up."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.console import show_progress
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.recording import recording
from pipeline.simulation import DIRECTORY, HAPPENED_FILE, Simulated, command, simulate
from pipeline.workspace import lock_workspace

_PIPE_WIDTH = 160


def main(options: argparse.Namespace) -> int:
    return _command(options) if options.verb == "fault" else _run(options)


def _run(options: argparse.Namespace) -> int:
    config, root = Config.load(), Path.cwd()
    with lock_workspace(root, "simulate"), recording(config), show_progress():
        result = simulate(config, root, options.scenario)
    written = root / DIRECTORY / HAPPENED_FILE
    if options.record:
        written = Path(shutil.copy(written, options.record))
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        _show(result)
        print(f"what happened, to run again: {written}")
    return 1 if result.error else 0


def _command(options: argparse.Namespace) -> int:
    values = {
        "fault": options.kind,
        **_parse_target(options.target),
        "for_seconds": options.seconds,
        "rate_mbit": options.mbit,
        "move_seconds": options.move,
    }
    done = command(Path.cwd(), {name: value for name, value in values.items() if value is not None})
    print(json.dumps({"done": done}) if options.json else done)
    return 0


def _parse_target(text: str) -> dict[str, Any]:
    """`node-1` or `rank-3`. Raises ConfigError."""
    kind, _, number = text.rpartition("-")
    if kind not in ("node", "rank") or not number.isdigit():
        raise ConfigError(
            f"'{text}' names nothing: write node-0, node-1, ... or rank-0, rank-1, ..."
        )
    return {kind: int(number)}


def _show(result: Simulated) -> None:
    table = Table("what", "step", "steps lost", "seconds lost", "")
    for notice in result.notices:
        lost = f"{notice.seconds_lost:.1f}" if notice.seconds_lost else ""
        table.add_row(notice.kind.replace("_", " "), str(notice.step), "", lost, notice.message)
    for incident in result.incidents:
        table.add_row(
            incident.cause.replace("_", " "),
            str(incident.last_step),
            str(incident.steps_lost),
            f"{incident.seconds_lost:.1f}",
            incident.message,
        )
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if table.row_count:
        console.print(table)
    for fault in result.left:
        print(f"did not happen, for the training ended before: {fault}")
    loss = "" if result.final_loss is None else f", loss {result.final_loss:.4f}"
    print(
        f"{result.steps} steps{loss}; {len(result.incidents)} incidents cost "
        f"{result.steps_lost} steps made again and, with the worlds that made way, "
        f"{result.seconds_lost:.1f} of {result.seconds:.1f} s"
    )
    if result.error:
        print(f"the training did not come to its end: {result.error}", file=sys.stderr)
