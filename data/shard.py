"""A file of records of one jurisdiction: an Apache Arrow IPC file, so any Arrow reader opens it.

NumPy and pyarrow load when a shard is opened, not with this module.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from data.errors import ShardBroken

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Split = Literal["train", "holdout"]

BATCH_RECORDS = 1024
"""Upper bound of the records in one record batch of a shard's file."""


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
        for batch in self.table.to_batches(BATCH_RECORDS):
            yield from batch.to_pylist()


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
