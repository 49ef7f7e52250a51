"""Sealed objects: the same wire format as Tink in both directions, and every change refused."""

import io
import os
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import tink
from hypothesis import given, settings
from hypothesis import strategies as st
from tink import secret_key_access, streaming_aead
from tink.proto import aes_gcm_hkdf_streaming_pb2, common_pb2, tink_pb2

from storage.buffers import Buffers
from storage.errors import SealBroken
from storage.sealed import (
    PART_BYTES,
    SEGMENT_BYTES,
    SealedReader,
    open_sealed,
    seal,
    seal_parts,
    sealed_size,
)

_KEY = bytes(range(32))
_PLACE = b'{"name":"shards/a"}'
_FIRST = SEGMENT_BYTES - 40 - 16
_LATER = SEGMENT_BYTES - 16
_SIZES = [
    *(0, 1, 15, 16, 17, 1000),
    *(_FIRST + d for d in (-1, 0, 1)),
    *(_FIRST + _LATER + d for d in (-1, 0, 1)),
    *(_FIRST + 2 * _LATER + d for d in (-1, 0, 1)),
    5 * SEGMENT_BYTES + 12345,
]


@pytest.fixture(scope="module")
def tink_aead() -> Any:
    """Tink's own AES256_GCM_HKDF_1MB under the same key."""
    streaming_aead.register()
    key = aes_gcm_hkdf_streaming_pb2.AesGcmHkdfStreamingKey(
        key_value=_KEY,
        params=aes_gcm_hkdf_streaming_pb2.AesGcmHkdfStreamingParams(
            ciphertext_segment_size=1 << 20, derived_key_size=32, hkdf_hash_type=common_pb2.SHA256
        ),
    )
    template = streaming_aead.streaming_aead_key_templates.AES256_GCM_HKDF_1MB
    parsed = aes_gcm_hkdf_streaming_pb2.AesGcmHkdfStreamingKeyFormat.FromString(template.value)
    assert key.params == parsed.params
    data = tink_pb2.KeyData(
        type_url=template.type_url,
        value=key.SerializeToString(),
        key_material_type=tink_pb2.KeyData.SYMMETRIC,
    )
    entry = tink_pb2.Keyset.Key(
        key_data=data, status=tink_pb2.ENABLED, key_id=1, output_prefix_type=tink_pb2.RAW
    )
    keyset = tink_pb2.Keyset(primary_key_id=1, key=[entry]).SerializeToString()
    handle = tink.proto_keyset_format.parse(keyset, secret_key_access.TOKEN)
    return handle.primitive(streaming_aead.StreamingAead)


@pytest.mark.parametrize("size", _SIZES)
def test_tink_opens_what_is_sealed_here(tink_aead: Any, size: int) -> None:
    plaintext = os.urandom(size)
    sealed = seal(_KEY, plaintext, _PLACE)
    assert len(sealed) == sealed_size(size)
    with tink_aead.new_decrypting_stream(io.BytesIO(sealed), _PLACE) as stream:
        assert stream.read() == plaintext


@pytest.mark.parametrize("size", _SIZES)
def test_what_tink_sealed_is_opened_here(tink_aead: Any, size: int) -> None:
    plaintext, sealed = os.urandom(size), _KeptOpen()
    with tink_aead.new_encrypting_stream(sealed, _PLACE) as stream:
        stream.write(plaintext)
    assert open_sealed(_KEY, sealed.getvalue(), _PLACE) == plaintext


class _KeptOpen(io.BytesIO):
    def close(self) -> None:
        pass


@pytest.mark.parametrize("size", [0, 1, _FIRST, _FIRST + _LATER, 3 * SEGMENT_BYTES + 7])
def test_a_range_is_read_from_its_segments_alone(size: int) -> None:
    plaintext = random.Random(size).randbytes(size)
    sealed, reads = seal(_KEY, plaintext, _PLACE), 0

    def read(start: int, end: int) -> bytes:
        nonlocal reads
        reads += 1
        return sealed[start:end]

    reader = SealedReader(_KEY, _PLACE, read, len(sealed))
    assert reader.num_bytes == size
    edges = {0, 1, _FIRST - 1, _FIRST, _FIRST + 1, _FIRST + _LATER, size - 1, size}
    positions = sorted(edge for edge in edges if 0 <= edge <= size)
    for start in positions:
        for end in (position for position in positions if position >= start):
            reads = 0
            assert reader.read(start, end) == plaintext[start:end]
            assert reads <= (end - start) // _LATER + 2
    for start, end in ((-1, 0), (0, size + 1), (size + 1, size + 1)):
        with pytest.raises(ValueError, match="are not within"):
            reader.read(start, end)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_range_of_any_size(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 2 * SEGMENT_BYTES + 100))
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    plaintext = (bytes(range(251)) * (size // 251 + 1))[:size]
    sealed = seal(_KEY, plaintext, _PLACE)
    reader = SealedReader(_KEY, _PLACE, lambda a, b: sealed[a:b], len(sealed))
    assert reader.read(start, end) == plaintext[start:end]


def test_sealing_twice_gives_other_bytes() -> None:
    assert seal(_KEY, b"same", _PLACE) != seal(_KEY, b"same", _PLACE)


def test_views_are_sealed_and_opened() -> None:
    sealed = seal(_KEY, memoryview(bytearray(b"abc")), _PLACE)
    assert open_sealed(_KEY, memoryview(sealed), _PLACE) == b"abc"


def test_another_key_or_place_is_refused() -> None:
    sealed = seal(_KEY, b"content", _PLACE)
    for key, place in ((bytes(32), _PLACE), (_KEY, b'{"name":"shards/b"}'), (_KEY, b"")):
        with pytest.raises(SealBroken, match="segment 0 does not authenticate") as caught:
            open_sealed(key, sealed, place)
        assert "content" not in str(caught.value)
    for key in (b"", bytes(16), bytes(33)):
        with pytest.raises(ValueError, match="a data key has 32 bytes"):
            open_sealed(key, sealed, _PLACE)


@pytest.mark.parametrize("size", [0, 5])
def test_any_flipped_bit_of_a_small_object_is_refused(size: int) -> None:
    sealed = seal(_KEY, bytes(size), _PLACE)
    for position in range(8 * len(sealed)):
        _assert_broken(_flipped(sealed, position))


def test_a_flipped_bit_anywhere_in_a_large_object_is_refused() -> None:
    sealed = seal(_KEY, bytes(2 * SEGMENT_BYTES), _PLACE)
    chosen = random.Random(2)
    positions = [8 * byte + chosen.randrange(8) for byte in range(40)]
    positions += [8 * (SEGMENT_BYTES + byte) for byte in (-17, -16, -1, 0, 1)]
    positions += [chosen.randrange(8 * len(sealed)) for _ in range(40)]
    for position in positions:
        _assert_broken(_flipped(sealed, position))


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_small_object_cut_anywhere_is_refused(size: int) -> None:
    sealed = seal(_KEY, bytes(size), _PLACE)
    for length in range(len(sealed)):
        _assert_broken(sealed[:length])
    for extra in range(1, 20):
        _assert_broken(sealed + bytes(extra))


def test_segments_cut_removed_swapped_or_added_are_refused() -> None:
    sealed = seal(_KEY, os.urandom(4 * _LATER), _PLACE)
    parts = [sealed[i : i + SEGMENT_BYTES] for i in range(0, len(sealed), SEGMENT_BYTES)]
    assert len(parts) == 5
    other = seal(_KEY, bytes(4 * _LATER), _PLACE)
    changed = {
        "cut at a boundary": parts[:4],
        "cut to one segment": parts[:1],
        "cut within": [*parts[:4], parts[4][:-1]],
        "second removed": [parts[0], *parts[2:]],
        "first removed": parts[1:],
        "swapped": [parts[0], parts[2], parts[1], *parts[3:]],
        "repeated": [*parts[:2], *parts[1:]],
        "last repeated": [*parts, parts[4]],
        "one from another object": [*parts[:2], other[2 << 20 : 3 << 20], *parts[3:]],
        "header of another object": [other[:40], parts[0][40:], *parts[1:]],
        "empty segment added": [*parts[:4], bytes(16)],
    }
    for case in changed.values():
        _assert_broken(b"".join(case))


def test_a_cut_object_is_refused_before_any_range_is_read() -> None:
    sealed = seal(_KEY, bytes(3 * _LATER), _PLACE)
    cut = sealed[: 2 * SEGMENT_BYTES]
    with pytest.raises(SealBroken, match="segment 1 does not authenticate"):
        SealedReader(_KEY, _PLACE, lambda start, end: cut[start:end], len(cut))
    with pytest.raises(SealBroken, match="segment 3 does not authenticate"):
        SealedReader(_KEY, _PLACE, lambda start, end: cut[start:end], len(sealed))


def test_a_whole_object_is_sealed_and_opened_without_a_copy() -> None:
    plaintext = bytes(16 << 20)
    tracemalloc.start()
    try:
        sealed = seal(_KEY, plaintext, _PLACE)
        _, sealing = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert open_sealed(_KEY, sealed, _PLACE) == plaintext
        _, opening = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sealing < 1.3 * len(plaintext)
    assert opening - len(sealed) < 1.3 * len(plaintext)


def _flipped(sealed: bytes, position: int) -> bytes:
    changed = bytearray(sealed)
    changed[position // 8] ^= 1 << position % 8
    return bytes(changed)


def _assert_broken(sealed: bytes) -> None:
    with pytest.raises(SealBroken, match=r"the sealed object for .*shards/a.* is broken"):
        open_sealed(_KEY, sealed, _PLACE)


@pytest.mark.parametrize("size", [*_SIZES, PART_BYTES, 2 * PART_BYTES + 5])
def test_parts_are_one_sealed_object(size: int) -> None:
    plaintext = os.urandom(size)
    buffers = Buffers(PART_BYTES)
    parts = [bytes(p) for p in seal_parts(_KEY, _filler(plaintext), size, _PLACE, buffers)]
    assert all(len(part) == PART_BYTES for part in parts[:-1])
    assert 0 < len(parts[-1]) <= PART_BYTES
    assert open_sealed(_KEY, b"".join(parts), _PLACE) == plaintext


def test_parts_take_no_memory_for_the_whole() -> None:
    size = 64 << 20
    tracemalloc.start()
    try:
        zeros = bytes(SEGMENT_BYTES)

        def fill(into: memoryview) -> None:
            into[:] = zeros[: len(into)]

        for _ in seal_parts(_KEY, fill, size, _PLACE, Buffers(PART_BYTES)):
            pass
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def _filler(plaintext: bytes) -> Callable[[memoryview], None]:
    stream = io.BytesIO(plaintext)

    def fill(into: memoryview) -> None:
        assert stream.readinto(into) == len(into)

    return fill
