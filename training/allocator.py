"""What the C library does with memory that a step frees and the next step asks for again."""

import ctypes
import os

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_BYTES = 2**31 - 1
_LARGEST_BLOCK_BYTES = 32 << 20
"""More than that glibc does not take; larger blocks come from the kernel and go back to it."""
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, rather than give it back and be given it anew in every
    step, each page by an interrupt and cleared. Whether it was done.

    A step asks for what the one before it freed: what the process holds at most stays the same. Of
    glibc alone, and not where the environment has settings of its own. See mallopt(3).
    """
    if any(os.environ.get(name) for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES) and mallopt(_TRIM_THRESHOLD, _MOST_BYTES)
    )
