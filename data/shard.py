"""A file of records of one jurisdiction: an Apache Arrow IPC file, so any Arrow reader opens it.

NumPy and pyarrow load when a shard is written or opened, not with this module.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from data.errors import RecordRefused, ShardBroken
from data.record import Record

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Split = Literal["train", "holdout"]

_BATCH_RECORDS = 1024


class Shard(BaseModel, frozen=True, extra="forbid"):
    """What the manifest knows of a shard: all but its content."""

    name: str
    """File name, unique in its dataset: `<split>-<jurisdiction>-<index>.arrow`."""
    digest: str
    """SHA-256 of the plaintext file, hex."""
    split: Split
    jurisdiction: str
    num_records: int
    num_bytes: int
    """Size of the plaintext file."""


class ShardConfig(BaseModel, frozen=True, extra="forbid"):
    """How records become shards."""

    records_per_shard: PositiveInt = 4096
    """Upper bound of the records in one shard; memory grows with it, not with the dataset."""
    holdout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the records kept for evaluation, chosen by content, so that equal records never
    stand on both sides."""
    compression: Literal["zstd", "none"] = "zstd"


@dataclass(frozen=True)
class OpenShard:
    """A shard's records in memory."""

    table: "pa.Table" = field(repr=False)

    @property
    def num_records(self) -> int:
        return int(self.table.num_rows)

    def rows(self, indices: "Sequence[int] | np.ndarray[Any, Any]") -> list[dict[str, Any]]:
        """The fields of the records at these positions, in this order."""
        import pyarrow as pa

        taken: list[dict[str, Any]] = self.table.take(pa.array(indices, pa.int64())).to_pylist()
        return taken

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.table.to_batches(_BATCH_RECORDS):
            yield from batch.to_pylist()


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


def open_shard(shard: Shard, content: bytes | memoryview, where: str) -> OpenShard:
    """Check plaintext bytes against the manifest and give the records.

    `where` names the place for the error. Raises ShardBroken before any record is given.
    """
    if len(content) != shard.num_bytes:
        raise ShardBroken(
            f"shard {shard.name} in {where}: {len(content)} bytes instead of {shard.num_bytes}; "
            "it was cut or swapped. Run `convoy stage shard` and `convoy stage upload` again."
        )
    digest = hashlib.sha256(content).hexdigest()
    if digest != shard.digest:
        raise ShardBroken(
            f"shard {shard.name} in {where}: its digest is {digest[:16]}..., the manifest says "
            f"{shard.digest[:16]}...; it was changed or swapped. "
            "Run `convoy stage shard` and `convoy stage upload` again."
        )
    import pyarrow as pa

    with pa.ipc.open_file(pa.py_buffer(content)) as reader:
        return OpenShard(reader.read_all())


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
        writer.write_table(table, max_chunksize=_BATCH_RECORDS)
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
