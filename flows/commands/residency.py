"""`convoy residency check` and `explain`: what may be where, and why."""

import argparse
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from data.crossings import read_crossings
from data.errors import ManifestError
from data.manifest import Manifest
from data.upload import UploadReceipt, read_receipt
from pipeline import workspace
from pipeline.checks import read_current_manifest
from pipeline.config import PARAMS_FILE, Config
from pipeline.params_file import find_rules, read_params_file
from pipeline.residency_check import AskedCrossing, ResidencyCheck, check_residency
from pipeline.residency_explanation import Explanation, Verdict, explain_object

_MAX_NAMES = 12
_PIPE_WIDTH = 200


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    if options.verb == "explain":
        return _explain(config, options)
    manifest = _find_manifest(config)
    counted = read_crossings(workspace.CROSSINGS)
    rules = find_rules(read_params_file(Path(PARAMS_FILE)))
    found = check_residency(config, manifest, counted, datetime.now(UTC).date(), rules)
    if options.json:
        content = found.model_dump(mode="json")
        content["refused"] = len(found.refused)
        Console(soft_wrap=True).print_json(data=content)
    else:
        _show(found)
    return 1 if found.refused else 0


def _find_manifest(config: Config) -> Manifest | None:
    return read_current_manifest(config) if workspace.MANIFEST.exists() else None


def _show(found: ResidencyCheck) -> None:
    console = _console()
    console.print(_crossings_table(found.crossings))
    if found.version is None:
        console.print("no manifest yet: all jurisdictions that a rule names, without counts")
    if found.counts:
        table = Table(
            f"left in {found.counts[0].year}", "records", "yearly limit", box=None, pad_edge=False
        )
        for count in found.counts:
            limits = ", ".join(f"{limit:,} by {name}" for name, limit in count.limits.items())
            table.add_row(count.jurisdiction, f"{count.num_records:,}", limits or "none")
        console.print(table)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow")
    for reason in dict.fromkeys(crossing.reason for crossing in found.refused):
        console.print(f"refused, and the flow needs it: {reason}", style="red")
    if not found.refused:
        console.print("the flow gets all that it needs")


def _crossings_table(crossings: Iterable[AskedCrossing]) -> Table:
    """Jurisdictions with the same answer share a row."""
    rows: dict[tuple[object, ...], list[AskedCrossing]] = {}
    for c in crossings:
        # Of many refused for being unnamed, each reason names its jurisdiction.
        answer = (c.rule, c.mechanism, c.expires, c.allowed, c.needed, c.leaves_home)
        where = (c.asked_by, c.artifact, c.from_region, c.to_region)
        rows.setdefault((*where, *answer), []).append(c)
    table = Table(
        *("asked by", "artifact", "of", "from", "to", "records", "verdict", "rule"),
        *("mechanism", "until"),
        box=None,
        pad_edge=False,
    )
    for group in rows.values():
        first = group[0]
        verdict = "allowed" if first.allowed else "refused" if first.needed else "kept out"
        style = {"allowed": "", "refused": "bold red", "kept out": "dim"}[verdict]
        counts = [c.num_records for c in group if c.num_records is not None]
        table.add_row(
            first.asked_by,
            first.artifact,
            _name(c.jurisdiction for c in group),
            first.from_region or "-",
            first.to_region,
            f"{sum(counts):,}" if counts else "-",
            verdict,
            first.rule or "-",
            first.mechanism or "-",
            str(first.expires or "-"),
            style=style,
        )
    return table


def _explain(config: Config, options: argparse.Namespace) -> int:
    manifest = read_current_manifest(config)
    residency = config.residency.model_copy(update={"on_restricted": "exclude"})
    readable, _ = residency.split_readable(manifest.of("train"), config.site.name)
    today = datetime.now(UTC).date()
    receipts = _read_receipts(config, manifest)
    found = explain_object(config, options.object, manifest, receipts, readable, today)
    if options.json:
        content = found.model_dump(mode="json") | {"forbidden_in": list(found.forbidden_in)}
        Console(soft_wrap=True).print_json(data=content)
    else:
        _show_explanation(found)
    return 0


def _read_receipts(config: Config, manifest: Manifest) -> dict[str, UploadReceipt]:
    """Of the present version; a region without one holds none of it."""
    receipts = {}
    for name in config.regions:
        path = Path(workspace.RECEIPTS / f"{name}.json")
        try:
            receipts[name] = read_receipt(path, manifest)
        except ManifestError:
            continue  # it was not uploaded there yet
    return receipts


def _show_explanation(found: Explanation) -> None:
    console = _console()
    records = sum(found.num_records.values())
    console.print(
        f"{found.object}: {found.artifact} of {_name(found.num_records)}, {records:,} records, "
        f"dataset version {found.version[:12]}",
        soft_wrap=True,
    )
    for region, called in found.lies_in.items():
        console.print(f"lies in {region} as {called}", soft_wrap=True)
    if not found.lies_in:
        console.print("lies in no region yet: `convoy stage upload`")
    rows: dict[tuple[object, ...], list[Verdict]] = {}
    for v in found.verdicts:
        key = (v.region, v.lies_there, v.allowed, v.rule, v.reason if v.rule else None)
        rows.setdefault(key, []).append(v)
    table = Table("region", "lies there", "of", "may be there", "why", box=None, pad_edge=False)
    for group in rows.values():
        first = group[0]
        why = first.reason if first.rule or len(group) == 1 else "no rule lets it be there"
        if first.rule:
            why += f", until {first.expires}"
        table.add_row(
            first.region,
            "yes" if first.lies_there else "no",
            _name(v.jurisdiction for v in group),
            "yes" if first.allowed else "no",
            why,
        )
    console.print(table)


def _console() -> Console:
    """A pipe has no width: give its tables one that keeps their rows in a line."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def _name(jurisdictions: Iterable[str]) -> str:
    names = sorted(set(jurisdictions))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
