"""Shards: deterministic, one jurisdiction each, refused when they are not what they were."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.errors import ManifestError, RecordRefused, ShardBroken
from data.manifest import Manifest, read_manifest
from data.record import Record
from data.shard import Shard, open_shard
from data.sharding import ShardConfig, write_shards


def places(count: int) -> list[Record]:
    return [
        Record({"name": f"Ort {i} 北京", "population": i, "raw": bytes([i % 256])}, j)
        for i in range(count)
        for j in [("EU", "US", "CN")[i % 3]]
    ]


def shard_all(records: Iterable[Record], directory: Path, **config: Any) -> tuple[Shard, ...]:
    directory.mkdir()
    return write_shards(records, directory, ShardConfig(**config))


def read_all(directory: Path, shards: Iterable[Shard]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (shard.jurisdiction, row)
        for shard in shards
        for row in open_shard(shard, (directory / shard.name).read_bytes(), "here")
    ]


def test_every_record_is_in_one_shard_of_its_jurisdiction(tmp_path: Path) -> None:
    records = places(500)
    shards = shard_all(records, tmp_path / "a", records_per_shard=50)
    rows = read_all(tmp_path / "a", shards)
    key = lambda pair: pair[1]["population"]  # noqa: E731
    assert sorted(rows, key=key) == [(r.jurisdiction, dict(r.fields)) for r in records]
    assert max(shard.num_records for shard in shards) == 50
    assert {path.name for path in (tmp_path / "a").iterdir()} == {shard.name for shard in shards}
    held_out = sum(s.num_records for s in shards if s.split == "holdout")
    assert 20 < held_out < 90


def test_equal_records_give_equal_bytes(tmp_path: Path) -> None:
    first = shard_all(places(300), tmp_path / "a")
    second = shard_all(iter(places(300)), tmp_path / "b")
    assert first == second
    for shard in first:
        assert (tmp_path / "a" / shard.name).read_bytes() == (
            tmp_path / "b" / shard.name
        ).read_bytes()
    other = shard_all(places(299), tmp_path / "c")
    assert Manifest(dataset="d", shards=first).digest != Manifest(dataset="d", shards=other).digest


def test_equal_records_never_stand_on_both_sides(tmp_path: Path) -> None:
    shards = shard_all(places(100) * 3, tmp_path / "a")
    sides: dict[int, set[str]] = {}
    for shard in shards:
        for row in open_shard(shard, (tmp_path / "a" / shard.name).read_bytes(), "here"):
            sides.setdefault(row["population"], set()).add(shard.split)
    assert len(sides) == 100
    assert all(len(split) == 1 for split in sides.values())


def test_arrow_types_survive(tmp_path: Path) -> None:
    fields = {
        "nested": {"a": [1, 2], "b": None},
        "flag": True,
        "weight": 0.5,
        "missing": None,
    }
    tokens = np.arange(5, dtype=np.uint16)
    record = Record(fields | {"tokens": tokens}, "EU")
    shards = shard_all([record], tmp_path / "a", holdout=0.0)
    [(_, row)] = read_all(tmp_path / "a", shards)
    back = row.pop("tokens")
    assert row == fields
    assert back.dtype == np.uint16
    assert back.tolist() == tokens.tolist()


def test_any_arrow_reader_opens_a_shard(tmp_path: Path) -> None:
    [shard] = shard_all(places(1), tmp_path / "a", holdout=0.0)
    with pa.ipc.open_file(tmp_path / "a" / shard.name) as reader:
        assert reader.read_all().num_rows == 1


@pytest.mark.parametrize("jurisdiction", ["", "  ", None, "../EU", "E U"])
def test_a_record_without_a_jurisdiction_is_refused_by_its_place(
    tmp_path: Path, jurisdiction: Any
) -> None:
    records = [*places(2), Record({"name": "geheim"}, jurisdiction)]
    with pytest.raises(RecordRefused, match="record 2") as refused:
        shard_all(records, tmp_path / "a")
    assert "geheim" not in str(refused.value)


def test_mixed_types_name_the_field_and_no_value(tmp_path: Path) -> None:
    records = [Record({"size": 1}, "EU"), Record({"size": "geheim"}, "EU")]
    with pytest.raises(RecordRefused, match="field 'size'") as refused:
        shard_all(records, tmp_path / "a", holdout=0.0)
    assert "geheim" not in str(refused.value)


def test_a_changed_cut_or_swapped_shard_is_refused(tmp_path: Path) -> None:
    shards = shard_all(places(100), tmp_path / "a", records_per_shard=20, holdout=0.0)
    content = (tmp_path / "a" / shards[0].name).read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for bad in (bytes(flipped), content[:-1], content + b"x", b""):
        with pytest.raises(ShardBroken, match=shards[0].name):
            open_shard(shards[0], bad, "region eu")
    with pytest.raises(ShardBroken, match="region eu"):
        open_shard(shards[1], content, "region eu")


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    manifest = Manifest(dataset="d", shards=shard_all(places(10), tmp_path / "a"))
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest.content)
    assert read_manifest(path) == manifest
    path.write_bytes(manifest.content.replace(b",", b", ", 1))
    with pytest.raises(ManifestError, match="canonical"):
        read_manifest(path)
    path.write_bytes(b"{}")
    with pytest.raises(ManifestError, match="manifest"):
        read_manifest(path)
    path.unlink()
    with pytest.raises(ManifestError, match="convoy stage shard"):
        read_manifest(path)
