"""The manifest: canonical JSON, refused when it is anything else, and quick when it is long."""

import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from data.errors import ManifestError
from data.manifest import Manifest, read_manifest
from data.shard import Shard


def make_shard(number: int, jurisdiction: str = "EU") -> Shard:
    return Shard(
        name=f"train-{jurisdiction}-{number:05d}.arrow",
        digest=f"{number:064x}",
        split="train",
        jurisdiction=jurisdiction,
        num_records=100,
        num_bytes=2000,
    )


MANIFEST = Manifest(dataset="places", shards=tuple(make_shard(number) for number in range(3)))


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(1, 2**53 - 1))
def test_the_content_is_canonical_json(text: str, count: int) -> None:
    shard = Shard(
        name=text, digest=text, split="train", jurisdiction=text, num_records=count, num_bytes=1
    )
    manifest = Manifest(dataset=text, shards=(shard,))
    assert manifest.content == rfc8785.dumps(json.loads(manifest.content))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    manifest = Manifest(dataset="places", shards=(make_shard(1, "Île"), *MANIFEST.shards))
    path.write_bytes(manifest.content)
    read = read_manifest(path)
    assert read == manifest
    assert read.digest == manifest.digest
    assert read.count_records("train") == {"EU": 300, "Île": 100}


def edited(**changes: Any) -> bytes:
    value = json.loads(MANIFEST.content)
    for key, change in changes.items():
        (value if key in value else value["shards"])[key] = change
    return rfc8785.dumps(value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no manifest"),
        (b"{}", "no manifest"),
        (MANIFEST.content + b"\n", "not canonical"),
        (MANIFEST.content.replace(b"places", b"pl\\u0061ces"), "not canonical"),
        (MANIFEST.content[:-1] + b',"dataset":"places"}', "not canonical"),
        (MANIFEST.content.replace(b"2000", b"2e3", 1), r"not canonical"),
        (edited(format="convoy-manifest-v1"), "its format is 'convoy-manifest-v1'"),
        (edited(dataset=7), "dataset"),
        (edited(shards=[]), "not the columns"),
        (edited(extra=1), "not the columns"),
        (edited(name=["a.arrow"]), "not a list as long"),
        (edited(name=["a.arrow", "b.arrow", "a.arrow"]), "twice"),
        (edited(name=["a.arrow", "../b", "c.arrow"]), r"shards\.name"),
        (edited(digest=["0" * 64, "0" * 64, "A" * 64]), r"shards\.digest"),
        (edited(split=["train", "test", "train"]), r"shards\.split"),
        (edited(num_records=[1, 2, -3]), r"shards\.num_records"),
        (edited(num_records=[1, 2, True]), r"shards\.num_records"),
        (edited(num_bytes=[1, 2, "3"]), r"shards\.num_bytes"),
        (edited(jurisdiction=["EU", None, "EU"]), r"shards\.jurisdiction"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(ManifestError, match=f"(?s){complaint}.*convoy stage shard"):
        read_manifest(path)
