"""What records() yields is what collate receives, whatever its type, or it is refused by field."""

import datetime
import enum
from collections import OrderedDict
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from data.column_reader import read_column
from data.columns import Unfit, build_column
from data.errors import RecordRefused
from data.record import Record
from data.shard import OpenShard, Shard, open_shard
from data.sharding import ShardConfig, write_shards

TOKYO = ZoneInfo("Asia/Tokyo")
NOON = datetime.datetime(2026, 11, 30, 12, 0, 0, 250)
DTYPES = "?bBhHiIqQefdFD"


class Colour(enum.StrEnum):
    RED = "red"


def round_trip(values: Sequence[Any]) -> tuple[pa.Field, list[Any]]:
    """The values through a file of small record batches, whole and by position."""
    field, array = build_column("x", values)
    table = pa.table([array], schema=pa.schema([field]))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pa.ipc.open_file(sink.getvalue()) as reader:
        table = reader.read_all()
    read = read_column(table.schema.field(0), table.column(0).combine_chunks())
    back = list(read.take(np.arange(len(values))))
    order = np.arange(len(values))[::-1]
    assert all(map(same, reversed(back), read.take(order)))
    return table.schema.field(0), back


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        alike = isinstance(other, np.ndarray) and one.dtype == other.dtype
        return bool(alike and one.shape == other.shape and one.tobytes() == other.tobytes())
    return bool(one == other and type(one) is type(other))


@pytest.mark.parametrize(
    "values",
    [
        *([np.arange(6).reshape(2, 3).astype(dtype)] for dtype in DTYPES),
        *([np.ones(3, dtype), None, np.zeros(3, dtype)] for dtype in DTYPES),
        *([np.ones(3, dtype), None, np.zeros(0, dtype), np.ones(5, dtype)] for dtype in DTYPES),
        *([np.ones((2, 2), dtype), None, np.ones((3, 1), dtype)] for dtype in DTYPES),
        [np.zeros((0, 2)), np.zeros((0, 2))],
        [np.arange(6).reshape(2, 3).T, np.zeros((3, 2), int)[:, ::-1]],
        [np.array(["2026-01-01", "NaT"], "M8[ns]"), np.array([1, 2], "M8[ns]")],
        [np.array([1, 2], "m8[D]")],
        ["text", "", None, "北京"],
        [b"\x00\xff", None, b""],
        [True, None, False],
        [-(2**63), 2**63 - 1, None],
        [2**64, -(2**200), None, 1],
        [0.5, float("inf"), None],
        [Decimal("1.10"), None, Decimal("12345678901234567890.5")],
        [NOON, None, datetime.datetime.min, datetime.datetime.max],
        [NOON.replace(tzinfo=TOKYO), NOON.replace(tzinfo=datetime.UTC)],
        [datetime.date(1, 1, 1), None],
        [datetime.time(5, 30), None],
        [datetime.timedelta(days=-3, microseconds=1), None],
        [None, None],
        [[], None, [1, None, 3]],
        [{"a": [{"b": [1, 2], "c": {"d": "x"}}], "e": None}, None],
        [[[["deep"]]], []],
        [{}, None],
    ],
    ids=lambda values: str(type(values[0]).__name__),
)
def test_values_come_back(values: list[Any]) -> None:
    _, back = round_trip(values)
    assert all(map(same, values, back))


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ((1, 2), [1, 2]),
        (np.float32(0.5), 0.5),
        (np.array(3), 3),
        (np.array(["a", "b"]), ["a", "b"]),
        ({"x": np.arange(3)}, {"x": [0, 1, 2]}),
        ([np.eye(2)], [[[1.0, 0.0], [0.0, 1.0]]]),
        (np.datetime64("2026-01-01"), datetime.datetime(2026, 1, 1)),
        (pa.scalar(7, pa.uint8()), 7),
        (pa.array([1, 2], pa.uint8()), [1, 2]),
        (bytearray(b"x"), b"x"),
        (memoryview(b"x"), b"x"),
        (Colour.RED, "red"),
        (OrderedDict(a=1), {"a": 1}),
        (MappingProxyType({"a": 1}), {"a": 1}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_come_back_as_pythons_own(value: Any, back: Any) -> None:
    assert round_trip([value])[1] == [back]


def test_what_is_missing_in_a_mapping_comes_back_as_none() -> None:
    assert round_trip([{"a": 1}, {"b": "x"}])[1] == [{"a": 1, "b": None}, {"a": None, "b": "x"}]


def test_arrays_are_stored_as_they_are_and_may_be_changed() -> None:
    tokens = [np.arange(4, dtype=np.uint16) + i for i in range(5)]
    field, back = round_trip(tokens)
    assert field.type == pa.list_(pa.uint16(), 4)
    back[1][0] = 99
    assert back[2].tolist() == [2, 3, 4, 5]
    assert np.array([1, 2], ">i4").tolist() == round_trip([np.array([1, 2], ">i4")])[1][0].tolist()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (["a", b"b"], "it is bytes, and text before"),
        ([True, 1], "it is a whole number, and true or false before"),
        ([NOON.date(), NOON], "it is a date with time, and a date before"),
        ([NOON, NOON.replace(tzinfo=TOKYO)], "some times have a zone"),
        ([NOON.timetz().replace(tzinfo=TOKYO)], "a time of day has a zone"),
        ([{"a": {"b": 1}}, {"a": {"b": "x"}}], "at 'a.b' it is text, and a whole number before"),
        ([[1, "x"]], r"at '\[\]' it is text"),
        ([np.arange(2), np.arange(2.0)], "a NumPy array of float64, and of int64 before"),
        ([np.arange(2), None, [1, 2]], "NumPy arrays and other values"),
        ([np.zeros(2, "g")], "have no Arrow type"),
        ([np.zeros(2, "i4,i4")], "have no Arrow type"),
        ([10**80], "more than 76 digits"),
        ([[2**64]], "beyond 64 bits"),
        ([2**60 + 1, 0.5], "no one Arrow type"),
        ([Decimal("NaN")], "no one Arrow type"),
        (["\ud800"], "half of a surrogate pair"),
        ([{"a": "\ud800"}], "no one Arrow type"),
        ([{1: 2}], "keys that are not text"),
        ([{1, 2}], "holds a set"),
        ([1 + 2j], "holds a complex"),
        ([object()], "holds a object"),
        ([np.datetime64("2026-01-01T00:00:00.000000001")], "finer than a microsecond"),
    ],
)
def test_what_fits_no_column_is_refused_without_its_value(values: list[Any], reason: str) -> None:
    with pytest.raises(Unfit, match=reason):
        build_column("x", values)


def shard_all(rows: list[dict[str, Any]], directory: Path, **config: Any) -> tuple[Shard, ...]:
    directory.mkdir()
    records = [Record(row, "EU") for row in rows]
    return write_shards(records, directory, ShardConfig(holdout=0.0, **config))


def read_schema(path: Path) -> pa.Schema:
    with pa.ipc.open_file(str(path)) as reader:
        return reader.schema


def open_all(directory: Path, shards: Sequence[Shard]) -> list[OpenShard]:
    return [open_shard(s, (directory / s.name).read_bytes(), "here") for s in shards]


@pytest.mark.parametrize(
    "values",
    [
        [None, None, "text", "more"],
        ["text", "more", None, None],
        [1, 2, 0.5, 1.5],
        [1, 2, 2**70, None],
        [Decimal("1.5"), Decimal(2), Decimal("123456.25"), None],
        [[], [], [1], [2]],
        [{"a": None}, {"a": None}, {"a": [{"b": "x"}]}, {"a": None}],
        [None, None, np.arange(3), np.arange(3)],
        [np.arange(3), np.arange(3), np.arange(4), np.arange(2)],
        [NOON.replace(tzinfo=TOKYO)] * 2 + [NOON.replace(tzinfo=datetime.UTC)] * 2,
    ],
    ids=str,
)
def test_all_shards_have_the_same_columns(tmp_path: Path, values: list[Any]) -> None:
    rows = [{"x": value} for value in values]
    shards = shard_all(rows, tmp_path / "a", records_per_shard=2)
    back = [row["x"] for shard in open_all(tmp_path / "a", shards) for row in shard]
    for one, other in zip(values, back, strict=True):
        assert same(one, other) or one == other
    first, second = (read_schema(tmp_path / "a" / shard.name).field("x") for shard in shards)
    if b"convoy:dtype" in (second.metadata or {}):
        assert first.metadata[b"convoy:dtype"] == second.metadata[b"convoy:dtype"]
    else:
        assert first.equals(second, check_metadata=True)


def test_a_field_that_comes_late_is_in_every_shard(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1}, {"a": 2}, {"a": 3, "b": "x"}]
    shards = shard_all(rows, tmp_path / "a", records_per_shard=1)
    back = [row for shard in open_all(tmp_path / "a", shards) for row in shard]
    assert back == [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": "x"}]
    assert shards == shard_all(rows, tmp_path / "b", records_per_shard=1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, "geheim"),
        (b"geheim", "x"),
        (["geheim"], "geheim"),
        (np.arange(3), [1]),
        (np.arange(3), np.arange(3.0)),
        (NOON, NOON.replace(tzinfo=TOKYO)),
        (2**70, 0.5),
        (2**60 + 1, 0.5),
    ],
    ids=str,
)
def test_shards_whose_columns_cannot_be_the_same_are_refused(
    tmp_path: Path, first: Any, second: Any
) -> None:
    rows = [{"size": first}, {"size": second}]
    with pytest.raises(RecordRefused, match=r"field 'size' is .* and .*one type") as refused:
        shard_all(rows, tmp_path / "a", records_per_shard=1)
    assert "geheim" not in str(refused.value)
