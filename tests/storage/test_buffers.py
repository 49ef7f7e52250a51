"""Memory that is used again, and not while somebody reads it."""

import mmap

import numpy as np
import obstore
import pytest

from storage.buffers import Buffers, Memory, allocate


def test_a_large_buffer_begins_a_page() -> None:
    view = Buffers(8 << 20).lend((8 << 20) - 16)
    assert len(view) == (8 << 20) - 16
    assert np.frombuffer(view, np.uint8).ctypes.data % mmap.PAGESIZE == 0


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


def test_memory_of_an_object_is_used_again_once_nothing_refers_to_it() -> None:
    memory = Memory(100, 1)
    lent = memory.lend(100)
    lent[:] = bytes(range(100))
    kept = np.frombuffer(lent.toreadonly()[40:50], np.uint8)[2:5]
    address = np.frombuffer(lent, np.uint8).ctypes.data
    assert memory.whole[42] == 42
    del lent
    other = memory.lend(80)
    other[:] = bytes(80)
    assert kept.tolist() == [42, 43, 44]
    del kept
    again = memory.lend(90)
    assert np.frombuffer(again, np.uint8).ctypes.data == address
    assert len(again) == 90


def test_objects_lie_apart_and_too_large_or_too_many_ones_elsewhere() -> None:
    memory = Memory(5000, 2)
    lent = [memory.lend(size) for size in (5000, 9000, 5000, 1)]
    for number, view in enumerate(lent):
        view[:] = bytes([number + 1]) * len(view)
    for number, view in enumerate(lent):
        assert set(bytes(view)) == {number + 1}
    assert set(memory.whole.tolist()) == {0, 1, 3}


def test_memory_that_the_kernel_does_not_give_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        allocate(1 << 60)
