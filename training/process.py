"""Processes that never outlive who started them."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(death_signal: signal.Signals) -> None:
    """Have the kernel send this process `death_signal` when its parent ends, however it ends."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)
