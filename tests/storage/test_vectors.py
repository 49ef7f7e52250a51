"""The vectors of docs/format.md: the valid ones open and are sealed again to the same bytes."""

import base64
import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from storage import errors
from storage.envelope import content_address, envelope_name, obtain_data_key, unwrap_data_key
from storage.keyring import DataKey, EncryptionContext, open_keyring
from storage.region import Region
from storage.sealed import open_sealed, seal, sealed_size
from storage.store import open_store

_VECTORS = Path(__file__).parents[1] / "vectors"


def _load(name: str) -> Any:
    return json.loads((_VECTORS / name).read_text())


_SEALED = _load("sealed.json")
_ENVELOPE = _load("envelope.json")
_ADDRESS = _load("content_address.json")
_VALID = {vector["name"]: vector for vector in _SEALED["valid"]}


@pytest.mark.parametrize("name", _VALID)
def test_valid_objects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = _VALID[name]
    sealed = _seal(vector, monkeypatch)
    assert len(sealed) == vector["sealed_bytes"] == sealed_size(vector["num_bytes"])
    assert hashlib.sha256(sealed).hexdigest() == vector["sealed_sha256"]
    assert sealed.hex() == vector.get("sealed", sealed.hex())
    place = vector["associated_data"].encode()
    assert open_sealed(bytes.fromhex(vector["key"]), sealed, place) == _plaintext(vector)


@pytest.mark.parametrize("vector", _SEALED["invalid"], ids=lambda vector: vector["name"])
def test_invalid_objects(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    base = _VALID[vector["of"]]
    sealed = _seal(base, monkeypatch)
    if "keep" in vector:
        sealed = b"".join(sealed[start:end] for start, end in vector["keep"])
    if "flip_bit" in vector:
        index, bit = divmod(vector["flip_bit"], 8)
        sealed = sealed[:index] + bytes([sealed[index] ^ 1 << bit]) + sealed[index + 1 :]
    sealed += bytes.fromhex(vector.get("append", ""))
    key = bytes.fromhex(vector.get("key", base["key"]))
    place = vector.get("associated_data", base["associated_data"]).encode()
    with pytest.raises(errors.SealBroken):
        open_sealed(key, sealed, place)


def test_a_valid_envelope_opens(region: Region) -> None:
    _put_envelope(region, _ENVELOPE["envelope"])
    assert _unwrap(region).hex() == _ENVELOPE["data_key"]


def test_the_envelope_is_written_to_the_same_bytes(region: Region) -> None:
    envelope = json.loads(_ENVELOPE["envelope"])
    data_key = bytes.fromhex(_ENVELOPE["data_key"])

    class Keyring:
        def generate(self, context: EncryptionContext) -> DataKey:
            wrapped = base64.b64decode(envelope["wrapped_key"])
            return DataKey(data_key, wrapped)

        def unwrap(self, wrapped: bytes, context: EncryptionContext) -> bytes:
            return data_key

    store, context = open_store(region), _ENVELOPE["context"]
    obtain_data_key(region, store, Keyring(), context["dataset"], context["version"])
    assert store.get(envelope_name(context["version"])).decode() == _ENVELOPE["envelope"]


@pytest.mark.parametrize("vector", _ENVELOPE["invalid"], ids=lambda vector: vector["name"])
def test_invalid_envelopes(vector: dict[str, str], region: Region) -> None:
    _put_envelope(region, vector["envelope"])
    with pytest.raises(getattr(errors, vector["error"])):
        _unwrap(region)


@pytest.mark.parametrize("vector", _ADDRESS["vectors"])
def test_content_addresses(vector: dict[str, str]) -> None:
    assert hashlib.sha256(vector["content"].encode()).hexdigest() == vector["digest"]
    data_key = bytes.fromhex(vector["data_key"])
    assert content_address(data_key, vector["digest"]) == vector["address"]


@pytest.mark.parametrize("digest", _ADDRESS["invalid_digests"])
def test_invalid_digests(digest: str) -> None:
    with pytest.raises(ValueError, match="not a SHA-256"):
        content_address(bytes(32), digest)


def _seal(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bytes:
    drawn: dict[int, bytes] = {
        32: bytes.fromhex(vector["salt"]),
        7: bytes.fromhex(vector["nonce_prefix"]),
    }
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_bytes", drawn.__getitem__)
        place = vector["associated_data"].encode()
        return seal(bytes.fromhex(vector["key"]), _plaintext(vector), place)


def _plaintext(vector: dict[str, Any]) -> bytes:
    num_bytes: int = vector["num_bytes"]
    return (bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]


def _put_envelope(region: Region, envelope: str) -> None:
    key_file = Path(region.wrapping_key.removeprefix("file:"))
    key_file.parent.mkdir()
    key_file.touch(mode=0o600)
    key_file.write_bytes(bytes.fromhex(_ENVELOPE["wrapping_key"]))
    open_store(region).put(envelope_name(_ENVELOPE["context"]["version"]), envelope.encode())


def _unwrap(region: Region) -> bytes:
    context = _ENVELOPE["context"]
    return unwrap_data_key(
        region, open_store(region), open_keyring(region), context["dataset"], context["version"]
    )
