"""Records become shards: grouped by split and jurisdiction, in the order they come.

NumPy and pyarrow load when a shard is written, not with this module.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from data.errors import RecordRefused
from data.record import Record
from data.shard import BATCH_RECORDS, Shard, Split

if TYPE_CHECKING:
    import pyarrow as pa


class ShardConfig(BaseModel, frozen=True, extra="forbid"):
    """How records become shards."""

    records_per_shard: PositiveInt = 4096
    """Upper bound of the records in one shard; memory grows with it, not with the dataset."""
    holdout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the records kept for evaluation, chosen by content, so that equal records never
    stand on both sides."""
    compression: Literal["zstd", "none"] = "zstd"


def write_shards(
    records: Iterable[Record], directory: Path, config: ShardConfig
) -> tuple[Shard, ...]:
    """Group records by split and jurisdiction into Arrow files in `directory`.

    The same records in the same order and the same config give the same bytes. At most
    `records_per_shard` records of each split and jurisdiction are in memory at once.
    Raises RecordRefused naming the record by its place in the input, never by its content.
    """
    pending: dict[tuple[Split, str], list[Mapping[str, Any]]] = {}
    counts: dict[tuple[Split, str], int] = {}
    shards: list[Shard] = []

    def flush(group: tuple[Split, str]) -> None:
        rows = pending.pop(group)
        index = counts.get(group, 0)
        counts[group] = index + 1
        shards.append(_write(rows, directory, group, index, config.compression))

    for number, record in enumerate(records):
        check_record(record, number)
        group = (_split(record, config.holdout, number), record.jurisdiction)
        rows = pending.setdefault(group, [])
        rows.append(record.fields)
        if len(rows) >= config.records_per_shard:
            flush(group)
    for group in sorted(pending):
        flush(group)
    return tuple(sorted(shards, key=lambda shard: shard.name))


def check_record(record: Any, number: int) -> None:
    """Raise RecordRefused, with the record's place and none of its content, unless it can be
    sharded: it is a Record, its fields have names, and it says whose law it is under.
    """
    if not isinstance(record, Record):
        raise RecordRefused(
            f"record {number} of the workload's records() is a {type(record).__name__}; "
            "yield data.record.Record(fields, jurisdiction)"
        )
    if not isinstance(record.jurisdiction, str) or not record.jurisdiction.strip():
        raise RecordRefused(
            f"record {number} of the workload's records() has no jurisdiction; "
            "every record must say whose law it is under, for example 'EU'"
        )
    if not record.jurisdiction.replace("-", "").replace("_", "").isalnum():
        raise RecordRefused(
            f"record {number} of the workload's records(): a jurisdiction is letters, digits, "
            "'-' and '_' alone, since it names files"
        )
    fields = record.fields
    if not isinstance(fields, Mapping) or not fields or not all(isinstance(f, str) for f in fields):
        raise RecordRefused(
            f"record {number} of the workload's records(): its fields are not values by name; "
            "give a mapping of at least one name (text) to a value"
        )


def _split(record: Record, holdout: float, number: int) -> Split:
    try:
        text = json.dumps(record.fields, sort_keys=True, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, TypeError) else "a field holds itself"
        raise RecordRefused(
            f"record {number} of the workload's records(): {what}; "
            "fields hold text, bytes, numbers, dates, lists, mappings and numpy arrays"
        ) from None
    draw = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8]
    return "holdout" if int.from_bytes(draw) < holdout * 2**64 else "train"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value).hex()}
    if _is_numpy(value):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a field holds a {type(value).__name__}")


def _is_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy"


def _write(
    rows: list[Mapping[str, Any]],
    directory: Path,
    group: tuple[Split, str],
    index: int,
    compression: str,
) -> Shard:
    split, jurisdiction = group
    name = f"{split}-{jurisdiction}-{index:05d}.arrow"
    content = _encode(rows, name, compression)
    (directory / name).write_bytes(content)
    return Shard(
        name=name,
        digest=hashlib.sha256(content).hexdigest(),
        split=split,
        jurisdiction=jurisdiction,
        num_records=len(rows),
        num_bytes=len(content),
    )


def _encode(rows: list[Mapping[str, Any]], name: str, compression: str) -> memoryview:
    import pyarrow as pa

    columns = sorted({column for row in rows for column in row})
    table = pa.table({c: _column([row.get(c) for row in rows], c, name) for c in columns})
    codec = pa.Codec("zstd", compression_level=1) if compression == "zstd" else None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as writer:
        writer.write_table(table, max_chunksize=BATCH_RECORDS)
    return memoryview(sink.getvalue())


def _column(values: list[Any], column: str, name: str) -> "pa.Array":
    import pyarrow as pa

    try:
        return pa.array([v.tolist() if _is_numpy(v) else v for v in values])
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        # Arrow's own message would quote the value.
        raise RecordRefused(
            f"field '{column}' in shard {name}: its values have no one Arrow type; "
            "give the field one type in the workload's records()"
        ) from None
