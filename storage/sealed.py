"""Sealed objects: Tink's streaming AEAD wire format, AES256-GCM-HKDF with 1 MiB segments.

The format is published at https://developers.google.com/tink/streaming-aead/aes_gcm_hkdf_streaming
and specified, as Convoy writes it, in docs/format.md. The primitives are those of `cryptography`;
the framing is written here because Tink's Python streams neither seek nor release the GIL.

    object  = header, segment 0, segment 1, ...
    header  = 40 (1 byte), salt (32 bytes), nonce prefix (7 bytes)
    segment = AES-256-GCM under the object's key, nonce = prefix, index (4 bytes), last (1 byte)

Each segment is 1 MiB sealed, the first one less by the header and the last one shorter. The
object's key is HKDF-SHA256 of the data key, with the salt, and the associated data as info.
"""

import io
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.buffers import Buffers, Memory
from storage.errors import SealBroken

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SEGMENT_BYTES = 1 << 20
PART_BYTES = 8 * SEGMENT_BYTES
KEY_BYTES = 32
_SALT_BYTES = 32
_PREFIX_BYTES = 7
_HEADER_BYTES = 1 + _SALT_BYTES + _PREFIX_BYTES
_TAG_BYTES = 16
_SEGMENT_PLAIN_BYTES = SEGMENT_BYTES - _TAG_BYTES
_MAX_SEGMENTS = 1 << 32


Read = Callable[[int, int], bytes | memoryview]
"""Gives the bytes of a sealed object from start to end (exclusive)."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Where one segment lies in the plaintext and in the sealed object, in bytes."""

    index: int
    plain_start: int
    plain_end: int
    sealed_start: int
    sealed_end: int


def load_ciphers() -> None:
    """Import now what is imported when an object is first sealed or opened."""
    _object_cipher(bytes(KEY_BYTES), bytes(_SALT_BYTES), b"")


def sealed_size(num_bytes: int) -> int:
    """Return the size in bytes of a sealed object that holds `num_bytes` of plaintext."""
    return num_bytes + _HEADER_BYTES + _TAG_BYTES * _num_segments(num_bytes)


def seal(key: bytes, plaintext: bytes | memoryview, associated_data: bytes) -> bytes:
    """Seal a whole object under a 32-byte data key. Sealing twice gives different bytes.

    `associated_data` is not stored: whoever opens the object must give the same.
    """
    plain = memoryview(plaintext).cast("B")
    salt, prefix = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_PREFIX_BYTES)
    cipher = _object_cipher(key, salt, associated_data)
    # BytesIO hands out what was written in it without a copy, which bytes(bytearray) does not.
    buffer = io.BytesIO(bytes(sealed_size(len(plain))))
    with buffer.getbuffer() as sealed:
        sealed[:_HEADER_BYTES] = bytes([_HEADER_BYTES]) + salt + prefix
        for segment in _segments(len(plain), 0, len(plain)):
            cipher.encrypt_into(
                _nonce(prefix, segment, len(plain)),
                plain[segment.plain_start : segment.plain_end],
                None,
                sealed[segment.sealed_start : segment.sealed_end],
            )
    return buffer.getvalue()


def seal_parts(
    key: bytes,
    fill: Callable[[memoryview], None],
    num_bytes: int,
    associated_data: bytes,
    buffers: Buffers,
) -> Iterator[memoryview]:
    """Seal an object of `num_bytes` of plaintext piece by piece: `seal`, with bounded memory.

    `fill` writes the next bytes of the plaintext over the whole of what it is given. Each part but
    the last has PART_BYTES, and lies in one of the `buffers`, which must have as many: a part is
    gone when the next one is asked for, unless who got it still exports its memory.
    """
    salt, prefix = secrets.token_bytes(_SALT_BYTES), secrets.token_bytes(_PREFIX_BYTES)
    cipher = _object_cipher(key, salt, associated_data)
    plain = memoryview(bytearray(min(num_bytes, _SEGMENT_PLAIN_BYTES)))
    size = sealed_size(num_bytes)
    part_start = 0
    part = buffers.lend(min(size, PART_BYTES))
    part[:_HEADER_BYTES] = bytes([_HEADER_BYTES]) + salt + prefix
    for segment in _segments(num_bytes, 0, num_bytes):
        if segment.sealed_start == part_start + PART_BYTES:
            yield part
            part_start = segment.sealed_start
            part = buffers.lend(min(size - part_start, PART_BYTES))
        piece = plain[: segment.plain_end - segment.plain_start]
        fill(piece)
        cipher.encrypt_into(
            _nonce(prefix, segment, num_bytes),
            piece,
            None,
            part[segment.sealed_start - part_start : segment.sealed_end - part_start],
        )
    yield part


def open_sealed(key: bytes, sealed: bytes | memoryview, associated_data: bytes) -> bytes:
    """Open a whole sealed object. Raises SealBroken, and returns nothing unauthenticated."""
    view = memoryview(sealed).cast("B")
    reader = SealedReader(key, associated_data, lambda start, end: view[start:end], len(view))
    return reader.read(0, reader.num_bytes)


def open_whole(
    key: bytes, associated_data: bytes, read: Read, sealed_bytes: int, memory: Memory
) -> memoryview:
    """Open a whole sealed object that is read from its start to its end: see SealedReader.

    Returns read-only memory. Raises SealBroken, and returns nothing unauthenticated.
    """
    opening = _Opening(key, associated_data, read, sealed_bytes)
    plain = memory.lend(opening.num_bytes)
    for segment in _segments(opening.num_bytes, 0, opening.num_bytes):
        opening.open_segment(segment, plain[segment.plain_start : segment.plain_end])
    return plain.toreadonly()


class SealedReader:
    """Reads ranges of a sealed object, segment by segment, without holding the whole.

    `read(start, end)` returns bytes of the sealed object, of `sealed_bytes` in all. The header
    and the last segment are read and authenticated at once, so that `num_bytes` can be trusted
    and an object cut at a segment boundary is refused before any of it is used. Raises
    SealBroken.
    """

    def __init__(self, key: bytes, associated_data: bytes, read: Read, sealed_bytes: int) -> None:
        self._opening = _Opening(key, associated_data, read, sealed_bytes)
        self.num_bytes = self._opening.num_bytes
        (last,) = _segments(self.num_bytes, self.num_bytes, self.num_bytes)
        self._tail = bytearray(last.plain_end - last.plain_start)
        self._opening.open_segment(last, memoryview(self._tail))

    def read(self, start: int, end: int) -> bytes:
        """Return plaintext bytes start to end (exclusive), which must lie in the object."""
        if not 0 <= start <= end <= self.num_bytes:
            raise ValueError(f"bytes {start} to {end} are not within {self.num_bytes}")
        segments = list(_segments(self.num_bytes, start, end))
        first = segments[0].plain_start
        buffer = io.BytesIO(bytes(segments[-1].plain_end - first))
        with buffer.getbuffer() as plain:
            for segment in segments:
                self._copy_segment(
                    segment, plain[segment.plain_start - first : segment.plain_end - first]
                )
        return buffer.getvalue()[start - first : end - first]

    def _copy_segment(self, segment: _Segment, into: memoryview) -> None:
        if segment.plain_end == self.num_bytes:
            into[:] = self._tail
        else:
            self._opening.open_segment(segment, into)


class _Opening:
    """A sealed object whose header was read, and whose segments can be opened."""

    def __init__(self, key: bytes, associated_data: bytes, read: Read, sealed_bytes: int) -> None:
        self._associated_data = associated_data
        self._read = read
        self.num_bytes = self._plain_size(sealed_bytes)
        header = bytes(read(0, _HEADER_BYTES))
        if len(header) != _HEADER_BYTES or header[0] != _HEADER_BYTES:
            raise self._broken("its header is not that of a sealed object")
        self._prefix = header[1 + _SALT_BYTES :]
        self._cipher = _object_cipher(key, header[1 : 1 + _SALT_BYTES], associated_data)

    def open_segment(self, segment: _Segment, into: memoryview) -> None:
        """Write the segment's plaintext into memory of its size."""
        from cryptography.exceptions import InvalidTag

        sealed = self._read(segment.sealed_start, segment.sealed_end)
        nonce = _nonce(self._prefix, segment, self.num_bytes)
        try:
            if len(sealed) != segment.sealed_end - segment.sealed_start:
                raise InvalidTag
            self._cipher.decrypt_into(nonce, sealed, None, into)
        except InvalidTag:
            raise self._broken(f"segment {segment.index} does not authenticate") from None

    def _plain_size(self, sealed_bytes: int) -> int:
        num_segments = -(-sealed_bytes // SEGMENT_BYTES)
        num_bytes = sealed_bytes - _HEADER_BYTES - _TAG_BYTES * num_segments
        if num_bytes < 0 or sealed_size(num_bytes) != sealed_bytes:
            raise self._broken(f"no sealed object has {sealed_bytes} bytes")
        return num_bytes

    def _broken(self, what: str) -> SealBroken:
        place = self._associated_data.decode("utf-8", "backslashreplace")
        return SealBroken(
            f"the sealed object for {place} is broken: {what}. It was changed, cut or swapped, "
            "or belongs to another place or key: write it again from its source"
        )


def _num_segments(num_bytes: int) -> int:
    """The first segment has room for 40 bytes less; an empty object still has one segment."""
    num_segments = max(1, -(-(num_bytes + _HEADER_BYTES) // _SEGMENT_PLAIN_BYTES))
    if num_segments > _MAX_SEGMENTS:
        raise ValueError(f"{num_bytes} bytes are too many for one sealed object")
    return num_segments


def _segments(num_bytes: int, start: int, end: int) -> Iterator[_Segment]:
    """Yield the segments that hold plaintext bytes start to end; for none, the one at start."""
    final = _num_segments(num_bytes) - 1
    first = min((start + _HEADER_BYTES) // _SEGMENT_PLAIN_BYTES, final)
    last = min((max(start, end - 1) + _HEADER_BYTES) // _SEGMENT_PLAIN_BYTES, final)
    for index in range(first, last + 1):
        plain_start = max(0, index * _SEGMENT_PLAIN_BYTES - _HEADER_BYTES)
        plain_end = min(num_bytes, (index + 1) * _SEGMENT_PLAIN_BYTES - _HEADER_BYTES)
        sealed_start = max(_HEADER_BYTES, index * SEGMENT_BYTES)
        yield _Segment(
            index,
            plain_start,
            plain_end,
            sealed_start,
            sealed_start + plain_end - plain_start + _TAG_BYTES,
        )


def _nonce(prefix: bytes, segment: _Segment, num_bytes: int) -> bytes:
    is_last = segment.plain_end == num_bytes
    return prefix + segment.index.to_bytes(4, "big") + bytes([is_last])


def _object_cipher(key: bytes, salt: bytes, associated_data: bytes) -> "AESGCM":
    # Loaded by who seals or opens, and not by every `convoy stage`.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(key) != KEY_BYTES:
        raise ValueError(f"a data key has {KEY_BYTES} bytes")
    return AESGCM(HKDF(SHA256(), KEY_BYTES, salt, associated_data).derive(key))
