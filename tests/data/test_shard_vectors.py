"""The shards of docs/format.md: the valid ones are read as their records, the others refused."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data.errors import ShardBroken
from data.record import Record
from data.shard import OpenShard, Shard, open_shard
from data.sharding import ShardConfig, write_shards

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "shard.json").read_text())


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_valid_shards(vector: dict[str, Any], tmp_path: Path) -> None:
    opened = open_vector(vector)
    records = [dict(zip(row, map(decode, row.values()), strict=True)) for row in vector["records"]]
    check_rows(list(opened), records)
    check_rows(list(opened.take(np.array([len(records) - 1]))), records[-1:])
    # Written again it has the same columns; the same bytes are asked of one release of Arrow alone.
    config = ShardConfig(holdout=0.0)
    (shard,) = write_shards([Record(row, "EU") for row in records], tmp_path, config)
    schemas = [
        pa.ipc.open_file(content).schema
        for content in ((tmp_path / shard.name).read_bytes(), base64.b64decode(vector["file"]))
    ]
    assert schemas[0].equals(schemas[1], check_metadata=True)


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])
def test_invalid_shards(vector: dict[str, Any]) -> None:
    with pytest.raises(ShardBroken, match=r"docs/format\.md"):
        open_vector(vector)


def open_vector(vector: dict[str, Any]) -> OpenShard:
    content = base64.b64decode(vector["file"])
    shard = Shard(
        name="train-EU-00000.arrow",
        digest=hashlib.sha256(content).hexdigest(),
        split="train",
        jurisdiction="EU",
        num_records=vector["num_records"],
        num_bytes=len(content),
    )
    return open_shard(shard, content, "here")


def check_rows(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, record in zip(rows, expected, strict=True):
        assert row.keys() == record.keys()
        for name, value in record.items():
            if isinstance(value, np.ndarray):
                assert row[name].dtype == value.dtype
                assert row[name].shape == value.shape
                assert row[name].tobytes() == value.tobytes()
            else:
                assert row[name] == value


def decode(value: Any) -> Any:
    if isinstance(value, dict) and "dtype" in value:
        content = bytes.fromhex(value["bytes"])
        return np.frombuffer(content, value["dtype"]).reshape(value["shape"])
    if isinstance(value, dict) and "integer" in value:
        return int(value["integer"])
    if isinstance(value, dict) and "bytes" in value:
        return bytes.fromhex(value["bytes"])
    return value
