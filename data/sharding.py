"""Records become shards: grouped by split and jurisdiction, in the order they come.

NumPy and pyarrow load when a shard is written, not with this module.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, PositiveInt

from data.column_types import conform, is_other, unify
from data.columns import Unfit, build_column
from data.errors import RecordRefused
from data.holdout import draw_split
from data.record import Record
from data.shard import Shard, Split

if TYPE_CHECKING:
    import pyarrow as pa

_RECORD_BYTES = 256
_VALUE_BYTES = 64
_PENDING_SHARDS = 4
"""All groups together wait for at most this many shards' worth of bytes."""
_TEXT = frozenset({str})
_SCALARS = frozenset({int, float, bool, type(None)})
_SOURCE = "of the workload's records()"
_MAX_KNOWN = 4096
_known: set[tuple[str, ...]] = set()
"""Jurisdiction and names of fields of records that were as they should be."""


class ShardConfig(BaseModel, frozen=True, extra="forbid"):
    """How records become shards."""

    records_per_shard: PositiveInt = 4096
    """Upper bound of the records in one shard."""
    bytes_per_shard: int = Field(default=32 << 20, ge=1 << 10, le=1 << 30)
    """Upper bound of the bytes in memory of one shard's records, counted as docs/format.md says.
    Memory grows with it, and not with the dataset or the number of its jurisdictions."""
    holdout: float = Field(default=0.1, ge=0.0, lt=1.0)
    """Share of the records kept for evaluation, chosen by content, so that equal records never
    stand on both sides, or by `Record.group`, so that no group does."""
    compression: Literal["zstd", "none"] = "zstd"


@dataclass(slots=True)
class _Group:
    """Records of one split and jurisdiction that wait for their shard."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Place of each record in the input."""
    num_bytes: int = 0


def write_shards(
    records: Iterable[Record], directory: Path, config: ShardConfig
) -> tuple[Shard, ...]:
    """Group records by split and jurisdiction into Arrow files in `directory`.

    The same records in the same order and the same config give the same bytes. A shard is written
    when it has `records_per_shard` records or no room for another within `bytes_per_shard`; when
    four times `bytes_per_shard` wait in all, the group with most bytes is written as it is. All
    shards have the same columns: those of earlier ones are written again where a later one shows
    another type.
    Raises RecordRefused naming the record by its place in the input, never by its content.
    """
    from numpy import ndarray

    writer = _Writer(directory, config.compression)
    pending: dict[tuple[Split, str], _Group] = {}
    waiting, limit, most_records = 0, config.bytes_per_shard, config.records_per_shard
    split: Split = "train"
    for number, record in enumerate(records):
        check_record(record, number)
        fields = record.fields
        num_bytes = _measure(fields, number, ndarray)
        if num_bytes > limit:
            raise _too_large(fields, number, num_bytes, limit)
        if config.holdout:
            split = _draw(record, config.holdout, number)
        key = (split, record.jurisdiction)
        group = pending.get(key)
        if group and group.num_bytes + num_bytes > limit:
            waiting -= writer.write(key, pending.pop(key))
            group = None
        if group is None:
            group = pending[key] = _Group()
        group.rows.append(fields)
        group.numbers.append(number)
        group.num_bytes += num_bytes
        waiting += num_bytes
        if len(group.rows) >= most_records:
            waiting -= writer.write(key, pending.pop(key))
        elif waiting > _PENDING_SHARDS * limit:
            key = max(pending, key=lambda key: (pending[key].num_bytes, key))
            waiting -= writer.write(key, pending.pop(key))
    for key in sorted(pending):
        writer.write(key, pending.pop(key))
    return writer.finish()


def check_record(record: Any, number: int) -> None:
    """Raise RecordRefused, with the record's place and none of its content, unless it can be
    sharded: it is a Record, its fields have names, and it says whose law it is under. A group, if
    it has one, is text.
    """
    if (
        type(record) is Record
        and type(record.jurisdiction) is str
        and type(record.fields) is dict
        and (record.group is None or type(record.group) is str)
        and (record.jurisdiction, *record.fields) in _known
    ):
        return
    if not isinstance(record, Record):
        raise RecordRefused(
            f"record {number} {_SOURCE} is a {type(record).__name__}; "
            "yield data.record.Record(fields, jurisdiction)"
        )
    if not isinstance(record.jurisdiction, str) or not record.jurisdiction.strip():
        raise RecordRefused(
            f"record {number} {_SOURCE} has no jurisdiction; "
            "every record must say whose law it is under, for example 'EU'"
        )
    if not record.jurisdiction.replace("-", "").replace("_", "").isalnum():
        raise RecordRefused(
            f"record {number} {_SOURCE}: a jurisdiction is letters, digits, "
            "'-' and '_' alone, since it names files"
        )
    fields = record.fields
    if not (isinstance(fields, Mapping) and fields and _TEXT.issuperset(map(type, fields))):
        raise RecordRefused(
            f"record {number} {_SOURCE}: its fields are not values by name; "
            "give a mapping of at least one name (text) to a value"
        )
    if not isinstance(record.group, str | None):
        raise RecordRefused(
            f"record {number} {_SOURCE}: its group is a {type(record.group).__name__}; give text "
            "that is the same in all records of the group, or None"
        )
    if len(_known) < _MAX_KNOWN:
        _known.add((record.jurisdiction, *fields))


def _draw(record: Record, holdout: float, number: int) -> Split:
    try:
        return draw_split(record.fields, holdout, record.group)
    except TypeError as error:
        raise _unfit(number, str(error)) from None
    except (ValueError, RecursionError):
        raise _unfit(number, "a field holds itself") from None


def _unfit(number: int, what: str) -> RecordRefused:
    return RecordRefused(
        f"record {number} {_SOURCE}: {what}; "
        "fields hold text, bytes, numbers, dates, lists, mappings and numpy arrays"
    )


def _measure(fields: Mapping[str, Any], number: int, array: type) -> int:
    total = _RECORD_BYTES
    for value in fields.values():
        kind = type(value)
        if kind is bytes or (kind is str and value.isascii()):
            total += _VALUE_BYTES + len(value)
        elif kind in _SCALARS:
            total += _VALUE_BYTES
        elif kind is array:
            total += _VALUE_BYTES + value.nbytes
        else:
            try:
                total += _measure_value(value)
            except RecursionError:
                raise _unfit(number, "a field holds itself") from None
    return total


def _too_large(fields: Mapping[str, Any], number: int, num_bytes: int, limit: int) -> RecordRefused:
    sizes = {name: _measure_value(value) for name, value in fields.items()}
    name = max(sizes, key=lambda name: sizes[name])
    return RecordRefused(
        f"record {number} {_SOURCE} is larger than a shard: {num_bytes} bytes, of them "
        f"{sizes[name]} in field '{name}'; cut it up, or raise params.yaml: "
        f"shard.bytes_per_shard, which is {limit}"
    )


def _measure_value(value: Any) -> int:
    """Bytes of a value, the same on every machine, which sys.getsizeof is not."""
    if isinstance(value, str):
        return _VALUE_BYTES + len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return _VALUE_BYTES + len(value)
    if isinstance(value, list | tuple):
        return _VALUE_BYTES + sum(map(_measure_value, value))
    if isinstance(value, Mapping):
        return _VALUE_BYTES + sum(map(_measure_value, chain(value, value.values())))
    return _VALUE_BYTES + int(getattr(value, "nbytes", 0))


class _Writer:
    """Writes shards, and sees to it that all have the same columns."""

    def __init__(self, directory: Path, compression: str) -> None:
        self._directory = directory
        self._compression = compression
        self._counts: dict[tuple[Split, str], int] = {}
        self._columns: dict[str, pa.Field] = {}
        self._shards: list[tuple[Shard, pa.Schema]] = []

    def write(self, key: tuple[Split, str], group: _Group) -> int:
        """Write the group's shard, and return the bytes that its records took."""
        split, jurisdiction = key
        index = self._counts.get(key, 0)
        self._counts[key] = index + 1
        name = f"{split}-{jurisdiction}-{index:05d}.arrow"
        self._save(name, key, _build(group, name))
        self._unify(name, group)
        return group.num_bytes

    def _unify(self, name: str, group: _Group) -> None:
        for found in self._shards[-1][1]:
            try:
                self._columns[found.name] = unify(self._columns.get(found.name, found), found)
            except Unfit as unfit:
                raise RecordRefused(
                    f"field '{found.name}' is {unfit.reason}: the last in shard {name} (records "
                    f"{group.numbers[0]} to {group.numbers[-1]} {_SOURCE}), the first in an "
                    "earlier one; give the field one type"
                ) from None

    def finish(self) -> tuple[Shard, ...]:
        """Give the columns of all to each, and return the shards by name."""
        wanted = [self._columns[column] for column in sorted(self._columns)]
        stale = {schema for _, schema in self._shards if _is_stale(schema, wanted)}
        written, self._shards = self._shards, []
        for shard, schema in written:
            if schema in stale:
                batch = _conform(self._directory / shard.name, wanted)
                self._save(shard.name, (shard.split, shard.jurisdiction), batch)
            else:
                self._shards.append((shard, schema))
        return tuple(sorted((shard for shard, _ in self._shards), key=lambda shard: shard.name))

    def _save(self, name: str, key: tuple[Split, str], batch: "pa.RecordBatch") -> None:
        content = _encode(batch, self._compression)
        (self._directory / name).write_bytes(content)
        split, jurisdiction = key
        shard = Shard(
            name=name,
            digest=hashlib.sha256(content).hexdigest(),
            split=split,
            jurisdiction=jurisdiction,
            num_records=batch.num_rows,
            num_bytes=len(content),
        )
        self._shards.append((shard, batch.schema))


def _build(group: _Group, name: str) -> "pa.RecordBatch":
    import pyarrow as pa

    fields, arrays = [], []
    for column in _list_columns(group.rows):
        try:
            field, array = build_column(column, [row.get(column) for row in group.rows])
        except Unfit as unfit:
            raise _refuse(column, name, group.numbers, unfit) from None
        fields.append(field)
        arrays.append(array)
    return pa.record_batch(arrays, schema=pa.schema(fields))


def _list_columns(rows: list[Mapping[str, Any]]) -> list[str]:
    return sorted(set(chain.from_iterable(set(map(tuple, rows)))))


def _refuse(column: str, name: str, numbers: list[int], unfit: Unfit) -> RecordRefused:
    which = f"records {numbers[0]} to {numbers[-1]}"
    if unfit.index is not None:
        which = f"record {numbers[unfit.index]}"
    return RecordRefused(
        f"{which} {_SOURCE}: field '{column}' in shard {name}: {unfit.reason}; "
        "give the field one type that Arrow can hold"
    )


def _is_stale(schema: "pa.Schema", wanted: "list[pa.Field]") -> bool:
    names = [column.name for column in wanted]
    return schema.names != names or any(map(is_other, schema, wanted))


def _conform(path: Path, wanted: "list[pa.Field]") -> "pa.RecordBatch":
    """A shard's records with these columns."""
    import pyarrow as pa

    with pa.ipc.open_file(pa.py_buffer(path.read_bytes())) as reader:
        batch = reader.get_batch(0)
    fields, arrays = [], []
    for column in wanted:
        index = batch.schema.get_field_index(column.name)
        if index < 0:
            found, array = pa.field(column.name, pa.null()), pa.nulls(batch.num_rows)
        else:
            found, array = batch.schema.field(index), batch.column(index)
        try:
            found, array = conform(found, column, array)
        except Unfit as unfit:
            raise RecordRefused(
                f"field '{column.name}' is {unfit.reason}: the first in shard {path.name}, the "
                "last in others; give the field one type"
            ) from None
        fields.append(found)
        arrays.append(array)
    return pa.record_batch(arrays, schema=pa.schema(fields))


def _encode(batch: "pa.RecordBatch", compression: str) -> memoryview:
    import pyarrow as pa

    codec = pa.Codec("zstd", compression_level=1) if compression == "zstd" else None
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())
