"""Memory that is used again, and not while somebody reads it."""

import numpy as np
import obstore

from storage.buffers import Buffers, Memory


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


def test_memory_of_any_size_is_used_again_once_nothing_refers_to_it() -> None:
    memory = Memory()
    lent = memory.lend(100)
    lent[:] = bytes(range(100))
    kept = np.frombuffer(lent.toreadonly()[40:50], np.uint8)[2:5]
    address = np.frombuffer(lent, np.uint8).ctypes.data
    del lent
    other = memory.lend(80)
    other[:] = bytes(80)
    assert kept.tolist() == [42, 43, 44]
    del kept
    again = memory.lend(90)
    assert np.frombuffer(again, np.uint8).ctypes.data == address
    assert len(again) == 90
