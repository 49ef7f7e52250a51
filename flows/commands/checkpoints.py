"""`convoy checkpoints`: what there is; `export` writes one as a file."""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline import workspace
from pipeline.checkpoints import ListedCheckpoint, export_checkpoint, list_checkpoints
from pipeline.config import Config
from pipeline.recording import recording


def main(options: argparse.Namespace) -> int:
    config, root = Config.load(), Path.cwd()
    if options.verb == "export":
        return _export(config, root, options)
    found = list_checkpoints(config, root)
    if options.json:
        print(json.dumps([one.model_dump(mode="json") for one in found], indent=2))
    elif found:
        Console().print(_table(found))
    else:
        print("no checkpoint: training makes them, and a run that ended leaves the last ones here")
    return 0


def _export(config: Config, root: Path, options: argparse.Namespace) -> int:
    with workspace.lock_workspace(root, "checkpoints export"), recording(config):
        chosen = export_checkpoint(
            config, root, options.output, run=options.run, step=options.step, best=options.best
        )
    answer = {"file": str(options.output), "checkpoint": chosen.name, "step": chosen.commit.step}
    print(json.dumps(answer) if options.json else f"{options.output}: {chosen.name}")
    return 0


def _table(found: tuple[ListedCheckpoint, ...]) -> Table:
    table = Table("run", "step", "time", "MB", "loss", "where", "kept as", box=None, pad_edge=False)
    for one in found:
        places = (("disk", one.on_disk), ("store", one.in_store))
        table.add_row(
            one.run,
            str(one.step),
            f"{one.time:%Y-%m-%d %H:%M:%S} UTC",
            f"{one.num_bytes / 1e6:.1f}",
            "" if one.loss is None else f"{one.loss:.4f}",
            ", ".join(name for name, is_there in places if is_there),
            "best" if one.best else "new",
        )
    return table
