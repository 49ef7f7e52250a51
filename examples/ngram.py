"""An interpolated n-gram model of bytes: what a language model has to beat."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

_NUM_BYTES = 256


class NGram:
    """Counts of the bytes that follow each context, smoothed after Witten and Bell.

    A context's own counts are mixed with the next shorter context's chances, the more so the more
    different bytes followed it: p(b | h) = (n(h, b) + t(h) p(b | shorter h)) / (n(h) + t(h)), with
    t(h) the number of different bytes seen after h. Below all contexts each byte is equally likely,
    so none has chance zero. (Witten and Bell, "The zero-frequency problem", 1991; Chen and Goodman,
    "An empirical study of smoothing techniques", 1999.)

    contexts(line, position): the contexts of a byte, shortest first.
    start: the position of the first byte to predict; those before are given.
    """

    def __init__(
        self,
        lines: Iterable[bytes],
        contexts: Callable[[bytes, int], tuple[bytes, ...]],
        start: int,
    ) -> None:
        self._contexts = contexts
        self._start = start
        self._counts: defaultdict[bytes, Counter[int]] = defaultdict(Counter)
        for line in lines:
            for position in range(start, len(line)):
                for context in contexts(line, position):
                    self._counts[context][line[position]] += 1
        self._totals = {context: counts.total() for context, counts in self._counts.items()}

    def chance(self, line: bytes, position: int) -> float:
        """The probability of the byte at `position`, given those before it."""
        chance = 1 / _NUM_BYTES
        for context in self._contexts(line, position):
            if counts := self._counts.get(context):
                mixed = counts[line[position]] + len(counts) * chance
                chance = mixed / (self._totals[context] + len(counts))
        return chance

    def bits(self, lines: Iterable[bytes]) -> tuple[float, int]:
        """Bits to write these lines, and the number of bytes they are for."""
        bits, num_bytes = 0.0, 0
        for line in lines:
            for position in range(self._start, len(line)):
                bits -= math.log2(self.chance(line, position))
                num_bytes += 1
        return bits, num_bytes
