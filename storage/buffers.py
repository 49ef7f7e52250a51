"""Memory that is used again: sealing into a buffer that was touched before is twice as fast."""

from collections import deque


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
