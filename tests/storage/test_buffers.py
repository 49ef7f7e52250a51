"""Memory that is used again, and not while somebody reads it."""

import obstore

from storage.buffers import Buffers


def test_memory_is_used_again() -> None:
    buffers = Buffers(8)
    first = buffers.lend(8)
    first[:] = b"12345678"
    assert bytes(buffers.lend(3)) == b"123"


def test_memory_that_is_read_elsewhere_is_left_alone() -> None:
    buffers = Buffers(8)
    first = buffers.lend(8)
    first[:] = b"12345678"
    reader = obstore.Bytes(first)
    other = buffers.lend(8)
    other[:] = b"abcdefgh"
    assert bytes(reader) == b"12345678"
    del reader
    third = obstore.Bytes(buffers.lend(8))
    assert {bytes(third), bytes(buffers.lend(8))} == {b"12345678", b"abcdefgh"}
