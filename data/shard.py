"""A file of records of one jurisdiction: an Apache Arrow IPC file, so any Arrow reader opens it.

NumPy and pyarrow load when a shard is opened, not with this module.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from data.columns import ReadColumn, Unfit, check_column, read_column
from data.errors import ShardBroken

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Split = Literal["train", "holdout"]

BATCH_RECORDS = 1024
"""Upper bound of the records in one record batch of a shard's file."""


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

    table: "pa.Table" = field(repr=False)

    @property
    def num_records(self) -> int:
        return int(self.table.num_rows)

    def rows(self, indices: "Sequence[int] | np.ndarray[Any, Any]") -> list[dict[str, Any]]:
        """The fields of the records at these positions, in this order."""
        import numpy as np

        return self._take(np.asarray(indices, np.int64))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        import numpy as np

        for start in range(0, self.num_records, BATCH_RECORDS):
            yield from self._take(np.arange(start, min(start + BATCH_RECORDS, self.num_records)))

    def _take(self, indices: "np.ndarray[Any, Any]") -> list[dict[str, Any]]:
        # Column after column into copies of one mapping: zipping each row's names and values
        # costs twice as much.
        blank: dict[str, Any] = dict.fromkeys(self.table.column_names)
        rows = [blank.copy() for _ in range(len(indices))]
        for name, read in zip(self.table.column_names, self._readers, strict=True):
            for row, value in zip(rows, read(indices), strict=True):
                row[name] = value
        return rows

    @cached_property
    def _readers(self) -> list["ReadColumn"]:
        return [
            read_column(field, self.table.column(index))
            for index, field in enumerate(self.table.schema)
        ]


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

    try:
        with pa.ipc.open_file(pa.py_buffer(content)) as reader:
            # In one piece, for text is taken out of many at the cost of copying them all.
            table = reader.read_all().combine_chunks()
        if table.num_rows != shard.num_records:
            raise Unfit(f"{table.num_rows} records instead of {shard.num_records}")
        for column in table.schema:
            check_column(column)
    except (pa.ArrowException, OSError, Unfit) as error:
        what = error.reason if isinstance(error, Unfit) else "it is no Arrow file"
        raise ShardBroken(
            f"shard {shard.name} in {where}: {what}: it was not written as docs/format.md says. "
            "Run `convoy stage shard` and `convoy stage upload` again."
        ) from None
    return OpenShard(table)
