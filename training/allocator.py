"""What the C library does with memory that a step frees and the next step asks for again."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of malloc.h
_LARGEST_BYTES = 2**31 - 1
_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, rather than give it back and be given it anew, a page
    at a time and each cleared, in every step. Whether it was done.

    Every step of a training asks for the same memory, so that what the process holds at most stays
    the same. Of glibc alone, and not where the environment says something else. See mallopt(3).
    """
    if any(os.environ.get(name) for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        and mallopt(_TRIM_THRESHOLD, _LARGEST_BYTES)
    )
