"""The columns of several shards as one: the same values as each gives, in any order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.column_reader import Blocks, Numbers, Parts, SpreadBlocks, Texts, join_columns
from data.record import Record
from data.shard import OpenShard, open_shard
from data.sharding import ShardConfig, write_shards
from storage.buffers import Memory

TEXTS = ["", "x", "zwölf Bytes!", "dreizehn Byte", "東京" * 900]
BLOCKS = [np.full((2, 3), i, np.int16) for i in range(5)]
COLUMNS: dict[str, tuple[list[Any], type]] = {
    "numbers": ([1, -2, 2**40, 0, 5], Numbers),
    "floats": ([0.5, -1.0, 2.0, 3.0, 4.0], Numbers),
    "texts": (TEXTS, Texts),
    "some texts": (["lang genug dafür", None, *TEXTS[2:]], Texts),
    "bytes": ([text.encode() for text in TEXTS], Texts),
    "blocks": (BLOCKS, SpreadBlocks),
    "some blocks": ([None, *BLOCKS[1:]], Parts),
    "ragged": ([np.arange(i) for i in range(5)], Parts),
    "some numbers": ([1, None, 3, 4, None], Parts),
    "lists": ([["a"], [], ["b", "c"], [], []], Parts),
}


def open_all(
    columns: Mapping[str, Sequence[Any]], directory: Path, memory: Memory, compression: str
) -> list[OpenShard]:
    """Shards of two records and of one, their content in the memory."""
    directory.mkdir()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    config = ShardConfig(records_per_shard=2, holdout=0.0, compression=compression)  # type: ignore[arg-type]
    opened = []
    for shard in write_shards((Record(row, "EU") for row in rows), directory, config):
        content = memory.lend(shard.num_bytes)
        content[:] = (directory / shard.name).read_bytes()
        opened.append(open_shard(shard, content, "here"))
    return opened


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_joined_columns_give_what_the_shards_hold(tmp_path: Path, compression: str) -> None:
    memory = Memory(1 << 16, 4)
    columns = {name: values for name, (values, _) in COLUMNS.items()}
    shards = open_all(columns, tmp_path / "shards", memory, compression)
    assert [shard.num_records for shard in shards] == [2, 2, 1]
    order = np.array([4, 0, 3, 3, 1, 2])
    for name, (values, kind) in COLUMNS.items():
        parts = [shard.columns[name] for shard in shards]
        joined = join_columns(parts, [2, 2, 1], memory.whole)
        # What Arrow had to decompress lies in memory of its own.
        assert type(joined) is (Parts if (name, compression) == ("blocks", "zstd") else kind), name
        for indices in (order, order[:1], np.arange(5)):
            taken = joined.take(indices)
            assert len(taken) == len(indices)
            for value, index in zip(taken, indices, strict=True):
                assert type(value) is type(values[index]), name
                assert np.array_equal(value, values[index]), name
                if isinstance(value, np.ndarray):
                    assert value.dtype == values[index].dtype
                    value += 1  # it is the receiver's own
            assert np.array_equal(joined.take(indices)[0], values[indices[0]]), name


def test_blocks_beside_a_memory_or_of_other_shapes_are_taken_part_by_part() -> None:
    around = np.arange(3000).astype(np.uint8)
    memory = around[1000:2000]

    def lay(start: int, shape: tuple[int, ...] = (2, 3), dtype: type = np.int16) -> Blocks:
        return Blocks(np.ndarray((2, *shape), dtype, around, start))

    inside = lay(1976)
    assert type(join_columns([inside, lay(1000)], [2, 2], memory)) is SpreadBlocks
    for second in (lay(998), lay(1978), lay(1200, (3, 2)), lay(1200, dtype=np.int32)):
        joined = join_columns([inside, second], [2, 2], memory)
        assert type(joined) is Parts
        taken = joined.take(np.array([3, 0]))
        assert np.array_equal(taken[0], second.values[1])
        assert np.array_equal(taken[1], inside.values[0])
