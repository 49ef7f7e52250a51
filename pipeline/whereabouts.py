"""Where every shard lives and why, for the report: jurisdictions by regions, and the rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal

from data.residency import Decision, Residency, Rule
from data.shard import Shard
from data.upload import PlacedShard, UploadReceipt


@dataclass(frozen=True)
class Cell:
    """One jurisdiction's shards in one region."""

    state: Literal["placed", "refused", "absent", "conflict"]
    """`absent`: allowed there and not placed. `conflict`: placed there and refused today."""
    num_shards: int
    num_records: int
    rule: str | None
    reason: str


@dataclass(frozen=True)
class Row:
    """One jurisdiction's shards, and where they are."""

    jurisdiction: str
    num_shards: int
    num_training: int
    """Records to train on."""
    num_held_out: int
    """Records to evaluate on."""
    cells: tuple[Cell, ...]
    """One a region, in the given order."""


@dataclass(frozen=True)
class RuleUse:
    """A rule that decides about shards of this dataset, and what it stands for."""

    rule: Rule
    expired: bool
    jurisdictions: tuple[str, ...]
    num_shards: int
    """Distinct shards, in however many regions."""
    num_records: int


@dataclass(frozen=True)
class Contents:
    """What lies in one region."""

    region: str
    shards: tuple[tuple[Shard, PlacedShard], ...]
    num_records: int
    num_bytes: int
    """Sealed."""


def place_rows(
    shards: Sequence[Shard],
    receipts: Mapping[str, UploadReceipt],
    residency: Residency,
    regions: Sequence[str],
    today: date,
) -> tuple[Row, ...]:
    """A row for each jurisdiction, most records first."""
    placed = {region: _names(receipts.get(region)) for region in regions}
    by_jurisdiction: dict[str, list[Shard]] = {}
    for shard in shards:
        by_jurisdiction.setdefault(shard.jurisdiction, []).append(shard)
    rows = []
    for jurisdiction, group in by_jurisdiction.items():
        cells = []
        for region in regions:
            there = [shard for shard in group if shard.name in placed[region]]
            decision = residency.decide(jurisdiction, "shard", region, today)
            cells.append(_judge(there, decision))
        num_training = sum(shard.num_records for shard in group if shard.split == "train")
        num_records = sum(shard.num_records for shard in group)
        rows.append(
            Row(jurisdiction, len(group), num_training, num_records - num_training, tuple(cells))
        )
    return tuple(
        sorted(rows, key=lambda row: (-row.num_training - row.num_held_out, row.jurisdiction))
    )


def use_rules(rows: Iterable[Row], residency: Residency, today: date) -> tuple[RuleUse, ...]:
    """The rules that the rows rest on, or rested on before they expired, in the policy's order."""
    users: dict[str, list[Row]] = {}
    for row in rows:
        for name in {cell.rule for cell in row.cells if cell.rule}:
            users.setdefault(name, []).append(row)
    return tuple(
        RuleUse(
            rule=rule,
            expired=rule.expires < today,
            jurisdictions=tuple(sorted(row.jurisdiction for row in users[rule.name])),
            num_shards=sum(row.num_shards for row in users[rule.name]),
            num_records=sum(row.num_training + row.num_held_out for row in users[rule.name]),
        )
        for rule in residency.rules
        if rule.name in users
    )


def list_contents(
    shards: Sequence[Shard], receipts: Mapping[str, UploadReceipt], regions: Sequence[str]
) -> tuple[Contents, ...]:
    """What the receipts say of each region; a region without a receipt is left out."""
    by_name = {shard.name: shard for shard in shards}
    contents = []
    for region in regions:
        if region not in receipts:
            continue
        # A receipt of this version names no other shards than the manifest's.
        pairs = tuple((by_name[placed.shard], placed) for placed in receipts[region].placed)
        contents.append(
            Contents(
                region=region,
                shards=pairs,
                num_records=sum(shard.num_records for shard, _ in pairs),
                num_bytes=sum(placed.num_bytes for _, placed in pairs),
            )
        )
    return tuple(contents)


def _names(receipt: UploadReceipt | None) -> frozenset[str]:
    return frozenset(placed.shard for placed in receipt.placed) if receipt else frozenset()


def _judge(there: Sequence[Shard], decision: Decision) -> Cell:
    state: Literal["placed", "refused", "absent", "conflict"]
    if there:
        state = "placed" if decision.allowed else "conflict"
    else:
        state = "absent" if decision.allowed else "refused"
    num_records = sum(shard.num_records for shard in there)
    return Cell(state, len(there), num_records, decision.rule, decision.reason)
