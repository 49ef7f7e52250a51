"""The ordered shards of a dataset. Written last: its existence means that the shards are whole.

docs/format.md specifies the file. Its shards are columns, and nothing of each is a model of its
own, so that a manifest of 100,000 shards opens in a second.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from data.errors import ManifestError
from data.shard import Shard, Split

_FORMAT: Literal["convoy-manifest-v2"] = "convoy-manifest-v2"
_COLUMNS = tuple(field.name for field in fields(Shard))
_LARGEST_EXACT = 2**53 - 1
"""RFC 8785 numbers are doubles: beyond it they are not exact."""
_TEXT = {
    "digest": re.compile(r"[0-9a-f]{64}"),
    "jurisdiction": re.compile(r"[\w-]+"),
    "name": re.compile(r"[\w.-]+"),
    "split": re.compile("|".join(get_args(Split))),
}
_ORDER = "run `convoy stage shard`"


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """All shards of one dataset version. Its digest is the version."""

    format: Literal["convoy-manifest-v2"] = _FORMAT
    dataset: str
    shards: tuple[Shard, ...]

    @cached_property
    def content(self) -> bytes:
        """Canonical JSON (RFC 8785), the bytes that the digest is of."""
        columns = {column: [getattr(shard, column) for shard in self.shards] for column in _COLUMNS}
        return _encode({"dataset": self.dataset, "format": self.format, "shards": columns})

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, hex: the version of the dataset."""
        return hashlib.sha256(self.content).hexdigest()

    def of(self, split: Split) -> tuple[Shard, ...]:
        """The shards of one split, in order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def count_records(self, split: Split | None = None) -> Counter[str]:
        """Records by jurisdiction."""
        counts: Counter[str] = Counter()
        for shard in self.shards:
            if split is None or shard.split == split:
                counts[shard.jurisdiction] += shard.num_records
        return counts


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing: {_ORDER}") from None
    try:
        value = json.loads(content)
        is_canonical = _encode(value) == content
    except (ValueError, RecursionError):
        raise ManifestError(f"{path} is not JSON: {_ORDER}") from None
    if not is_canonical:
        raise ManifestError(f"{path} is not canonical JSON: it was edited; {_ORDER}")
    for complaint in _complaints(value):
        raise ManifestError(f"{path}: {complaint}; {_ORDER}")
    columns = value["shards"]
    rows = zip(*(columns[column] for column in _COLUMNS), strict=True)
    manifest = Manifest(dataset=value["dataset"], shards=tuple(Shard(*row) for row in rows))
    # What was read is what it would be encoded as.
    manifest.__dict__["content"] = content
    return manifest


def _encode(value: Any) -> bytes:
    """RFC 8785 for what a manifest holds: names in ASCII, text, and whole numbers below 2^53.

    For these Python's own encoder, which is in C, writes the same bytes; a test holds it.
    """
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _complaints(value: Any) -> Iterator[str]:
    """What keeps a parsed file from being a manifest."""
    if not isinstance(value, dict) or value.keys() != {"dataset", "format", "shards"}:
        yield "it is no manifest: it has not the fields dataset, format and shards alone"
    elif value["format"] != _FORMAT:
        yield f"its format is {str(value['format'])[:40]!r}, and this release reads {_FORMAT!r}"
    elif not isinstance(value["dataset"], str) or not value["dataset"]:
        yield "dataset: it is not a name"
    elif not isinstance(value["shards"], dict) or value["shards"].keys() != set(_COLUMNS):
        yield f"shards: it has not the columns {', '.join(sorted(_COLUMNS))} alone"
    else:
        yield from _column_complaints(value["shards"])


def _column_complaints(columns: dict[str, Any]) -> Iterator[str]:
    for column, values in columns.items():
        if not isinstance(values, list) or len(values) != len(columns["name"]):
            yield f"shards.{column}: it is not a list as long as shards.name"
            return
        if not _is_valid(column, values):
            yield f"shards.{column}: an entry is not what the format allows"
            return
    if len(set(columns["name"])) != len(columns["name"]):
        yield "shards.name: a name is there twice"


def _is_valid(column: str, entries: list[Any]) -> bool:
    kinds = set(map(type, entries))
    pattern = _TEXT.get(column)
    if pattern is None:
        in_range = kinds <= {int} and min(entries, default=1) > 0
        return in_range and max(entries, default=1) <= _LARGEST_EXACT
    return kinds <= {str} and all(map(pattern.fullmatch, set(entries)))
