"""What a process keeps of the memory that it frees."""

import os
import subprocess
import sys

_ROUNDS = """
import resource
from training.allocator import keep_freed_memory

def use_memory():
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(32)]

def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use_memory()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

use_memory()
without = count_faults()
done = keep_freed_memory()
use_memory()
print(done, without, count_faults())
"""


def _run(**environment: str) -> tuple[bool, int, int]:
    said = subprocess.run(
        [sys.executable, "-c", _ROUNDS],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    done, without, with_it = said.stdout.split()
    return done == "True", int(without), int(with_it)


def test_freed_memory_is_used_again() -> None:
    done, without, with_it = _run()
    assert done
    num_pages = 10 * 32 * (1 << 20) // os.sysconf("SC_PAGESIZE")
    assert without > num_pages / 2 > 100 * with_it


def test_what_the_environment_says_of_it_stays() -> None:
    done, without, with_it = _run(MALLOC_TRIM_THRESHOLD_="1000000")
    assert not done
    assert with_it > without / 2
