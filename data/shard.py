"""A file of records of one jurisdiction: an Apache Arrow IPC file, so any Arrow reader opens it.

NumPy and pyarrow load when a shard is opened, not with this module.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from data.columns import Unfit
from data.errors import ShardBroken
from data.record import Records

if TYPE_CHECKING:
    import pyarrow as pa

    from data.arrays import Indices
    from data.column_reader import ReadColumn

Split = Literal["train", "holdout"]
Verify = Literal["seal", "digest"]
"""What is asked of a shard that is opened: that its seal authenticates, or its digest as well."""

_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Shard:
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


@dataclass(frozen=True)
class OpenShard:
    """A shard's records in memory."""

    num_records: int
    columns: "Mapping[str, ReadColumn]" = field(repr=False)

    def take(self, indices: "Indices") -> Records:
        """The records at these positions, in this order."""
        return Records({name: column.take(indices) for name, column in self.columns.items()})

    def records(self) -> Records:
        """All records, in order."""
        import numpy as np

        return self.take(np.arange(self.num_records))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import numpy as np

        for start in range(0, self.num_records, _AT_ONCE):
            yield from self.take(np.arange(start, min(start + _AT_ONCE, self.num_records)))


def open_shard(
    shard: Shard, content: bytes | memoryview, where: str, *, verify: Verify = "digest"
) -> OpenShard:
    """Check plaintext bytes against the manifest and give the records.

    `where` names the place for the error. With verify="seal" the digest is not computed: that is
    for content whose seal was authenticated under the name that its digest gives it. Raises
    ShardBroken before any record is given.
    """
    if len(content) != shard.num_bytes:
        raise ShardBroken(
            f"shard {shard.name} in {where}: {len(content)} bytes instead of {shard.num_bytes}; "
            "it was cut or swapped. Run `convoy stage shard` and `convoy stage upload` again."
        )
    if verify == "digest":
        _check_digest(shard, content, where)
    import pyarrow as pa

    from data.column_reader import read_column

    try:
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            table = reader.read_all()
        if table.num_rows != shard.num_records:
            raise Unfit(f"{table.num_rows} records instead of {shard.num_records}")
        columns = {
            column.name: read_column(column, _in_one(table.column(index)))
            for index, column in enumerate(table.schema)
        }
        if not columns:
            raise Unfit("records without a field")
    except (pa.ArrowException, OSError, ValueError) as error:
        what = error.reason if isinstance(error, Unfit) else "it is no Arrow file"
        raise ShardBroken(
            f"shard {shard.name} in {where}: {what}: it was not written as docs/format.md says. "
            "Run `convoy stage shard` and `convoy stage upload` again."
        ) from None
    return OpenShard(table.num_rows, columns)


def _check_digest(shard: Shard, content: bytes | memoryview, where: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != shard.digest:
        raise ShardBroken(
            f"shard {shard.name} in {where}: its digest is {digest[:16]}..., the manifest says "
            f"{shard.digest[:16]}...; it was changed or swapped. "
            "Run `convoy stage shard` and `convoy stage upload` again."
        )


def _in_one(column: "pa.ChunkedArray") -> "pa.Array":
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
