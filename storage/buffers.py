"""Memory that is used again.

The kernel gives a process its memory by the page, when a page is first touched: for new memory that
takes longer than to seal or open what goes into it.
"""

import contextlib
import mmap
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Block = np.ndarray[Any, np.dtype[np.uint8]]

_HUGE_PAGE_BYTES = 2 << 20


class Buffers:
    """Buffers of one size in bytes, for one thread at a time."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lent: deque[tuple[mmap.mmap, memoryview]] = deque()

    def lend(self, num_bytes: int) -> memoryview:
        """Lend memory for that many bytes, whose old content is undefined.

        A view that was lent before is taken back, unless a library that was handed it still reads
        it (it exports the buffer): a request in flight keeps its memory.
        """
        for _ in range(len(self._lent)):
            buffer, view = self._lent.popleft()
            try:
                view.release()
            except BufferError:
                self._lent.append((buffer, view))
            else:
                break
        else:
            buffer = allocate(self._num_bytes)
        view = memoryview(buffer)[:num_bytes]
        self._lent.append((buffer, view))
        return view


class Memory:
    """Memory for objects of at most `object_bytes`, so many of them at once, for many threads.

    It is used again when nobody refers to it any more, by no view nor array of it. All of it lies
    in `whole`, of which the kernel gives what is written.
    """

    def __init__(self, object_bytes: int, count: int) -> None:
        import numpy as np

        page = _HUGE_PAGE_BYTES if object_bytes >= _HUGE_PAGE_BYTES else mmap.PAGESIZE
        self._place_bytes = -(-object_bytes // page) * page
        self._memory = _reserve(max(1, count) * self._place_bytes)
        self.whole: Block = np.frombuffer(self._memory, np.uint8)
        self._free = [index * self._place_bytes for index in reversed(range(count))]

    def lend(self, num_bytes: int) -> memoryview:
        """Memory for that many bytes, whose content is undefined. Of what is larger, or one too
        many, the memory is its own."""
        if num_bytes > self._place_bytes or not self._free:
            return memoryview(allocate(num_bytes))
        start = self._free.pop()
        _ask_for_huge_pages(self._memory, start, num_bytes)
        lent = self.whole[start : start + num_bytes]
        weakref.finalize(lent, self._free.append, start).atexit = False
        return lent.data


def allocate(num_bytes: int) -> mmap.mmap:
    """New memory from the kernel, which begins at a page; at least one byte."""
    memory = _reserve(num_bytes)
    _ask_for_huge_pages(memory, 0, num_bytes)
    return memory


def _reserve(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the kernel gives no {num_bytes} bytes: {error.strerror}") from None


def _ask_for_huge_pages(memory: mmap.mmap, start: int, num_bytes: int) -> None:
    """Where whole ones fit: the kernel gives one of 2 MiB about as soon as ten of 4 KiB."""
    whole = num_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if whole:
        # A kernel without them gives small ones.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
