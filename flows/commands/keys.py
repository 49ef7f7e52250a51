"""`convoy keys rotate`, `shred` and `list`: the data keys of the regions."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data.crossings import read_crossings
from pipeline import workspace
from pipeline.checks import check_claimed
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.recording import recording
from storage.access_log import AccessLog
from storage.envelope import StoredEnvelope, list_envelopes, list_shredded
from storage.region import Region
from storage.rotation import EnvelopeDone, find_envelopes, rotate, shred
from storage.store import open_store


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    if options.verb == "list":
        return _list(config, options.json)
    what = f"keys {options.verb}"
    with workspace.lock_workspace(Path.cwd(), what), recording(config) as log:
        if options.verb == "rotate":
            return _rotate(config, options.regions, log, options.json)
        return _shred(config, options, log)


def _rotate(config: Config, names: Sequence[str], log: AccessLog, as_json: bool) -> int:
    done: list[EnvelopeDone] = []
    groups = _share_a_key(config, names or list(config.regions))
    for regions in groups:
        # No data key is wrapped by a key that lies elsewhere.
        check_claimed(config, regions, log)
    for regions in groups:
        done += rotate(regions, log, lambda envelope: _tell("wrapped anew", envelope))
    if as_json:
        print(json.dumps([dataclasses.asdict(envelope) for envelope in done], indent=2))
    else:
        print(f"rotate: {len(done)} data keys wrapped anew; no shard was touched")
    return 0


def _share_a_key(config: Config, names: Sequence[str]) -> list[tuple[Region, ...]]:
    """The regions, and those that have the wrapping key of one of them, grouped by it."""
    wanted = dict.fromkeys(config.find_region(name).wrapping_key for name in names)
    return [
        tuple(region for region in config.regions.values() if region.wrapping_key == key)
        for key in wanted
    ]


def _shred(config: Config, options: argparse.Namespace, log: AccessLog) -> int:
    region = config.find_region(options.region)
    found = find_envelopes(region, options.dataset, options.version)
    if not options.yes:
        _confirm(options.dataset, region, found)
    done = shred(region, found, log)
    if workspace.CROSSINGS.exists():
        crossings = read_crossings(workspace.CROSSINGS)
        for envelope in done:
            crossings = crossings.mark_shredded(envelope.version, region.name)
        crossings.write(workspace.CROSSINGS)
    if options.json:
        print(json.dumps([dataclasses.asdict(envelope) for envelope in done], indent=2))
        return 0
    for envelope in done:
        _tell("shredded", envelope)
    print(
        f"shred: dataset {options.dataset} can not be read in region {region.name} any more, in "
        f"{len(done)} versions.\nNot touched: raw input in {workspace.DATASETS}, plaintext shards "
        f"in {workspace.SHARDS}, what was trained, other regions, and copies of the store or of "
        "its keys that were made elsewhere."
    )
    return 0


def _confirm(dataset: str, region: Region, found: Sequence[StoredEnvelope]) -> None:
    """Raise PipelineError unless the user types the dataset's name."""
    print(
        f"This destroys the keys of {len(found)} versions of dataset {dataset} in region "
        f"{region.name} ({region.store}). There is no way back.",
        file=sys.stderr,
    )
    if not sys.stdin.isatty():
        raise PipelineError("nobody is here to confirm it: add --yes. Nothing was shredded")
    print(f"Type the dataset's name to go on ({dataset}): ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != dataset:
        raise PipelineError("that is not its name: nothing was shredded")


def _list(config: Config, as_json: bool) -> int:
    rows: list[dict[str, Any]] = []
    for region in config.regions.values():
        store = open_store(region)
        rows += [
            {"region": region.name, "dataset": e.dataset, "version": e.version, "shredded": None}
            for e in list_envelopes(region, store)
        ]
        rows += [
            {"region": region.name, "dataset": n.dataset, "version": n.version, "shredded": n.time}
            for n in list_shredded(store)
        ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    table = Table("region", "dataset", "version", "key", box=None, pad_edge=False)
    for row in rows:
        state = f"shredded {row['shredded']}" if row["shredded"] else "there"
        table.add_row(row["region"], row["dataset"], row["version"][:12], state)
    Console().print(table if rows else "no key yet: `convoy stage upload` makes them")
    return 0


def _tell(what: str, envelope: EnvelopeDone) -> None:
    where = f"{envelope.region}: {envelope.dataset} {envelope.version[:12]}"
    print(f"{where} {what}", file=sys.stderr)
