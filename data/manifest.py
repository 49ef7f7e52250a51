"""The ordered shards of a dataset. Written last: its existence means that the shards are whole."""

import hashlib
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Literal

import rfc8785
from pydantic import BaseModel, ValidationError

from data.errors import ManifestError
from data.shard import Shard, Split


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """All shards of one dataset version. Its digest is the version."""

    format: Literal["convoy-manifest-v1"] = "convoy-manifest-v1"
    dataset: str
    shards: tuple[Shard, ...]

    @cached_property
    def content(self) -> bytes:
        """Canonical JSON (RFC 8785), the bytes that the digest is of."""
        return rfc8785.dumps(self.model_dump())

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
        raise ManifestError(f"{path} is missing: run `convoy stage shard`") from None
    try:
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ManifestError(
            f"{path}: {place or 'the file'}: {first['msg']}; run `convoy stage shard`"
        ) from None
    if manifest.content != content:
        raise ManifestError(
            f"{path} is not canonical JSON: it was edited; run `convoy stage shard`"
        )
    return manifest
