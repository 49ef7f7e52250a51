"""Memory that is used again.

The kernel gives a process its memory by the page, when a page is first touched: for new memory that
takes longer than to seal or open what goes into it.
"""

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Block = np.ndarray[Any, np.dtype[np.uint8]]


class Buffers:
    """Buffers of one size in bytes, for one thread at a time."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._lent: deque[tuple[bytearray, memoryview]] = deque()

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
            buffer = bytearray(self._num_bytes)
        view = memoryview(buffer)[:num_bytes]
        self._lent.append((buffer, view))
        return view


class Memory:
    """Memory for objects of many sizes, for many threads.

    It is used again when nobody refers to it any more, by no view nor array of it.
    """

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._lock = threading.Lock()

    def lend(self, num_bytes: int) -> memoryview:
        """Memory for that many bytes, whose content is undefined."""
        import numpy as np

        block = self._find(num_bytes)
        if block is None:
            block = np.empty(num_bytes, np.uint8)
        lent = block[:num_bytes]
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent.data

    def _find(self, num_bytes: int) -> "Block | None":
        """The smallest free block that is large enough; without one the largest is let go."""
        with self._lock:
            self._free.sort(key=len)
            for index, block in enumerate(self._free):
                if len(block) >= num_bytes:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()
            return None
