"""Key envelopes: one key for a dataset version in a region, and no other place for it."""

import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from storage.canonical import canonical_json
from storage.envelope import (
    associated_data,
    content_address,
    envelope_name,
    obtain_data_key,
    unwrap_data_key,
)
from storage.errors import KeyringError, ObjectMissing, SealBroken
from storage.keyring import DataKey, EncryptionContext, open_keyring
from storage.region import Region
from storage.store import open_store
from tests.storage.conftest import MakeRegion, file_region

_NAME = "keys/v1.json"


def test_the_key_is_made_once_and_found_again(store_region: Region) -> None:
    made = _obtain(store_region)
    assert len(made) == 32
    assert _obtain(store_region) == made
    assert _unwrap(store_region) == made
    assert _obtain(store_region, version="v2") != made
    assert [info.name for info in open_store(store_region).list()] == [_NAME, "keys/v2.json"]


def test_every_keyring_can_hold_it(make_key_region: MakeRegion) -> None:
    region = make_key_region("eu")
    assert _obtain(region) == _unwrap(region)


def test_the_envelope_is_readable_and_shows_no_key(region: Region) -> None:
    key = _obtain(region)
    stored = open_store(region).get(_NAME)
    fields = json.loads(stored)
    assert canonical_json(fields) == stored
    assert fields.pop("wrapped_key")
    assert len(fields.pop("mac")) == 64
    assert fields == {
        "format": "convoy-envelope/1",
        "dataset": "places",
        "version": "v1",
        "region": "eu",
        "jurisdiction": "EU",
    }
    assert key not in stored
    assert key.hex().encode() not in stored


def test_racing_writers_get_one_key(store_region: Region) -> None:
    num_writers = 6
    barrier = threading.Barrier(num_writers)

    class Keyring:
        """Lets no writer store its key before all have made one."""

        def generate(self, context: EncryptionContext) -> DataKey:
            made = keyring.generate(context)
            barrier.wait(timeout=30)
            return made

        def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
            return keyring.unwrap(wrapped, context)

    keyring, store = open_keyring(store_region), open_store(store_region)
    with ThreadPoolExecutor(num_writers) as pool:
        keys = list(
            pool.map(
                lambda _: obtain_data_key(store_region, store, Keyring(), "places", "v1"),
                range(num_writers),
            )
        )
    assert set(keys) == {_unwrap(store_region)}


def test_a_version_that_is_not_there_is_named(region: Region) -> None:
    with pytest.raises(ObjectMissing, match=r"no keys/v1\.json.*upload that version"):
        _unwrap(region)


def test_a_shredded_key_is_not_made_anew_to_read(region: Region, tmp_path: Path) -> None:
    _obtain(region)
    (tmp_path / "stores/eu" / _NAME).unlink()
    with pytest.raises(ObjectMissing):
        _unwrap(region)


@pytest.mark.parametrize("field", ["dataset", "version", "region", "jurisdiction", "format"])
def test_a_misplaced_envelope_is_called_that(region: Region, field: str) -> None:
    _obtain(region)
    _edit(region, {field: "other"})
    with pytest.raises(SealBroken, match=rf"{_NAME} in regions\.eu\.store.*'other' and not '"):
        _unwrap(region)


def test_an_envelope_moved_from_elsewhere_is_refused(region: Region, tmp_path: Path) -> None:
    us = file_region(tmp_path, "us")
    _obtain(us)
    stored = open_store(us).get(_NAME)
    open_store(region).put(_NAME, stored)
    with pytest.raises(SealBroken, match="is for region 'us' and not 'eu'"):
        _obtain(region)
    open_store(us).put(envelope_name("v2"), stored)
    with pytest.raises(SealBroken, match="is for version 'v1' and not 'v2'"):
        _unwrap(us, version="v2")
    with pytest.raises(SealBroken, match="is for dataset 'places' and not 'digits'"):
        unwrap_data_key(us, open_store(us), open_keyring(us), "digits", "v1")


def test_a_wrapped_key_of_another_version_is_refused(region: Region) -> None:
    _obtain(region)
    _obtain(region, version="v2")
    other = json.loads(open_store(region).get("keys/v2.json"))["wrapped_key"]
    _edit(region, {"wrapped_key": other})
    with pytest.raises(KeyringError, match="does not unwrap this data key under the context"):
        _unwrap(region)


def test_a_changed_mac_or_spelling_is_refused(region: Region) -> None:
    _obtain(region)
    store = open_store(region)
    stored = store.get(_NAME)
    changed = [
        stored + b"\n",
        stored.replace(b'","', b'", "', 1),
        json.dumps(json.loads(stored), sort_keys=False, indent=1).encode(),
    ]
    for envelope in changed:
        store.put(_NAME, envelope)
        with pytest.raises(SealBroken, match="does not authenticate"):
            _unwrap(region)
    store.put(_NAME, stored)
    _edit(region, {"mac": "0" * 64})
    with pytest.raises(SealBroken, match="does not authenticate"):
        _unwrap(region)


@pytest.mark.parametrize(
    "stored",
    [b"", b"{}", b"[]", b"\xff", b'{"format":"convoy-envelope/1"}', b"null", b"{" * 100_000],
)
def test_what_is_no_envelope_is_refused(region: Region, stored: bytes) -> None:
    open_store(region).put(_NAME, stored)
    with pytest.raises(SealBroken, match="is not a key envelope"):
        _obtain(region)


@pytest.mark.parametrize(
    "changes", [{"extra": "x"}, {"wrapped_key": "not base64!"}, {"wrapped_key": 1}]
)
def test_unknown_fields_and_bad_values_are_refused(
    region: Region, changes: dict[str, str | int]
) -> None:
    _obtain(region)
    _edit(region, changes)
    with pytest.raises(SealBroken, match="is not a key envelope"):
        _unwrap(region)


def test_a_content_address_needs_the_key() -> None:
    digest = "ab" * 32
    address = content_address(bytes(32), digest)
    assert len(address) == 64
    assert address == content_address(bytes(32), digest)
    assert address != content_address(bytes([1]) * 32, digest)
    assert address != content_address(bytes(32), "cd" * 32)
    for bad in ("", "AB" * 32, "ab" * 31, f"{digest}\n"):
        with pytest.raises(ValueError, match="not a SHA-256 in lower-case hex"):
            content_address(bytes(32), bad)


def test_associated_data_is_canonical() -> None:
    assert (
        associated_data("places", "v1", "eu", "EU", "shards/ä")
        == (
            '{"dataset":"places","jurisdiction":"EU","name":"shards/ä","region":"eu","version":"v1"}'
        ).encode()
    )


def _obtain(region: Region, version: str = "v1") -> bytes:
    return obtain_data_key(region, open_store(region), open_keyring(region), "places", version)


def _unwrap(region: Region, version: str = "v1") -> bytes:
    return unwrap_data_key(region, open_store(region), open_keyring(region), "places", version)


def _edit(region: Region, changes: Mapping[str, str | int]) -> None:
    store = open_store(region)
    fields = json.loads(store.get(_NAME))
    store.put(_NAME, canonical_json(fields | changes))
