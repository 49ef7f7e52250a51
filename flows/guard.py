"""`python -m flows.guard ARGUMENTS...`: runs a Python module and ends its group with the parent.

A server that is killed alone leaves its children. So this process stands between: the kernel ends
it with its parent, and it then ends the whole process group.
"""

import contextlib
import os
import signal
import subprocess
import sys

from training.process import die_with_parent


def main(arguments: list[str]) -> int:
    child = subprocess.Popen([sys.executable, "-m", *arguments])

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(8)
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    die_with_parent(signal.SIGTERM)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
