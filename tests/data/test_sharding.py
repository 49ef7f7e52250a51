"""How records are grouped: bounded by records and bytes, and held out by their content alone."""

import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.errors import RecordRefused
from data.holdout import draw_split
from data.record import Record
from data.shard import Shard, open_shard
from data.sharding import ShardConfig, write_shards

PAYLOAD = 1000
WEIGHT = 256 + 64 + PAYLOAD
"""Bytes that one of `texts` counts for."""


def texts(count: int, jurisdictions: int = 1) -> Iterator[Record]:
    for i in range(count):
        yield Record({"text": f"{i:0{PAYLOAD}d}"}, f"J{i % jurisdictions}")


def read(directory: Path, shard: Shard) -> list[dict[str, Any]]:
    return list(open_shard(shard, (directory / shard.name).read_bytes(), "here"))


def test_a_shard_ends_before_it_has_too_many_bytes(tmp_path: Path) -> None:
    config = ShardConfig(bytes_per_shard=7 * WEIGHT + 5, holdout=0.0)
    shards = write_shards(texts(30), tmp_path, config)
    assert [shard.num_records for shard in shards] == [7, 7, 7, 7, 2]
    rows = [row for shard in shards for row in read(tmp_path, shard)]
    assert rows == [record.fields for record in texts(30)]


def test_memory_is_bounded_whatever_the_number_of_jurisdictions(tmp_path: Path) -> None:
    limit = 50 * WEIGHT
    config = ShardConfig(bytes_per_shard=limit, holdout=0.0)
    write_shards(texts(10), tmp_path, config)  # loads what loads once
    (tmp_path / "many").mkdir()
    tracemalloc.start()
    shards = write_shards(texts(1500, jurisdictions=150), tmp_path / "many", config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Four shards' worth of records wait, and each of the 150 groups is begun anew again and again.
    assert peak < 6 * limit + 3000 * len(shards)
    assert sum(shard.num_records for shard in shards) == 1500
    assert max(shard.num_records for shard in shards) < 50
    again = tmp_path / "again"
    again.mkdir()
    assert write_shards(texts(1500, jurisdictions=150), again, config) == shards


@pytest.mark.parametrize(
    "value",
    ["geheim" * 500, b"geheim" * 500, ["geheim"] * 500, {"a": ["geheim" * 500]}, np.ones(3000)],
    ids=lambda value: type(value).__name__,
)
def test_a_record_larger_than_a_shard_is_named_by_its_largest_field(
    tmp_path: Path, value: Any
) -> None:
    records = [Record({"id": 1, "image": b"x"}, "EU"), Record({"id": 2, "image": value}, "EU")]
    config = ShardConfig(bytes_per_shard=2048)
    message = r"record 1 .* larger than a shard: \d+ bytes, .* field 'image'.*bytes_per_shard"
    with pytest.raises(RecordRefused, match=message) as refused:
        write_shards(records, tmp_path, config)
    assert "geheim" not in str(refused.value)


def test_a_bad_value_is_named_by_record_and_field(tmp_path: Path) -> None:
    records = [Record({"id": i, "text": "x"}, "EU") for i in range(1000)]
    records.append(Record({"id": 1000, "text": "\ud800geheim"}, "EU"))
    with pytest.raises(RecordRefused, match=r"^record 1000 .* field 'text' .* UTF-8") as refused:
        write_shards(records, tmp_path, ShardConfig(holdout=0.0))
    assert "geheim" not in str(refused.value)


def test_types_that_change_within_a_shard_are_one_column(tmp_path: Path) -> None:
    values: list[Any] = [*([None] * 1500), *([1] * 1500), *([0.5] * 10)]
    records = [Record({"x": value}, "EU") for value in values]
    (shard,) = write_shards(records, tmp_path, ShardConfig(holdout=0.0))
    assert [row["x"] for row in read(tmp_path, shard)] == values


LONG = "x" * 5000
EARLIER = "ththhtthttttttthtthtttththttthhtthhtttth"


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"a": i, "b": "short"},
        lambda i: {"a": i, "b": LONG},
        lambda i: {"a": str(i) + LONG},
        lambda i: {"a": f"{i}".encode() + bytes(5000)},
        lambda i: {"a": np.full(1000, i, np.uint16), "b": None},
        lambda i: {"a": [i, {"b": Decimal(i), "c": i * 1j}], "b": LONG},
        lambda i: {"a": np.arange(i, i + 8)},
    ],
)
def test_a_share_is_held_out_by_content_alone(make: Any) -> None:
    splits = [draw_split(make(i), 0.2) for i in range(1000)]
    assert splits == [draw_split(dict(reversed(make(i).items())), 0.2) for i in range(1000)]
    assert 150 < splits.count("holdout") < 250
    assert {draw_split(make(i), 0.0) for i in range(20)} == {"train"}


def test_a_group_is_held_out_together_whatever_its_fields(tmp_path: Path) -> None:
    records = [Record({"n": i}, "EU" if i % 2 else "US", f"g{i % 200}") for i in range(1000)]
    config = ShardConfig(holdout=0.2)
    shards = write_shards(records, tmp_path, config)
    groups = {
        split: {
            row["n"] % 200
            for part in shards
            if part.split == split
            for row in open_shard(part, (tmp_path / part.name).read_bytes(), "here")
        }
        for split in ("train", "holdout")
    }
    assert not groups["train"] & groups["holdout"]
    assert 20 < len(groups["holdout"]) < 60
    assert {draw_split({"n": i}, 0.2, "one") for i in range(50)} == {draw_split({}, 0.2, "one")}
    with pytest.raises(RecordRefused, match=r"record 1 .*: its group is a int; give text"):
        write_shards([records[0], Record({"n": 1}, "EU", 7)], tmp_path, config)  # type: ignore[arg-type]


def test_short_records_are_drawn_as_in_earlier_releases() -> None:
    drawn = "".join(draw_split({"id": i, "name": f"Ort {i}"}, 0.3)[0] for i in range(40))
    assert drawn == EARLIER
