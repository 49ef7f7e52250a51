"""Large objects that are read piece by piece."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO

from storage.buffers import allocate

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenObject:
    """An object of this size in bytes."""

    num_bytes: int
    read: Callable[[int, int], memoryview]
    """Gives the bytes from start to end (exclusive); they may be gone at the next call."""


class Pieces:
    """Reads files by pieces, for many threads, into memory that is used again.

    The kernel gives memory by the page, when a page is first touched: for new memory that takes
    longer than to read and to decrypt what goes into it.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    @contextlib.contextmanager
    def open(self, file: FileIO) -> Iterator[OpenObject]:
        """An open file as an object. Its reading raises OSError."""
        piece = self._free.pop() if self._free else allocate(_PIECE_BYTES + mmap.PAGESIZE)

        def read(start: int, end: int) -> memoryview:
            small = end - start <= _PIECE_BYTES
            # The bytes stand in their pages as they do in the file's: some processors (AMD's Zen 3)
            # copy ten times slower to a place a few bytes further on, and malloc gives just that.
            place = start % mmap.PAGESIZE
            memory = piece if small else allocate(place + end - start)
            view = memoryview(memory)[place : place + end - start]
            num_bytes = 0
            while num_bytes < len(view) and (
                more := os.preadv(file.fileno(), [view[num_bytes:]], start + num_bytes)
            ):
                num_bytes += more
            return view[:num_bytes]

        try:
            yield OpenObject(os.fstat(file.fileno()).st_size, read)
        finally:
            self._free.append(piece)
