"""CPU seconds to load the stages and to show the command's help, each in a fresh process.

Reference: the interpreter alone. The limit of 0.5 s is what keeps `dvc repro` and shells quick.
"""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from benchmarks.table import Row, publish

LIMIT_SECONDS = 0.5
REPETITIONS = 9

COMMANDS = {
    "import pipeline.stages": [sys.executable, "-c", "import pipeline.stages"],
    "convoy --help": [str(Path(sys.executable).with_name("convoy")), "--help"],
}
BARE = [sys.executable, "-c", "pass"]


def cpu_seconds(command: list[str]) -> float:
    """User and system seconds of a command."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    for command in (*COMMANDS.values(), BARE):
        cpu_seconds(command)  # compiles what was never imported here
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    bare: list[float] = []
    for _ in range(REPETITIONS):
        bare.append(cpu_seconds(BARE))
        for name, command in COMMANDS.items():
            times[name].append(cpu_seconds(command))
    reference = median(bare)
    publish(
        "imports",
        "CPU s",
        [
            Row(
                case=name,
                ours=median(values),
                reference=reference,
                ratio=median(values) / reference,
                target=f"ours < {LIMIT_SECONDS} s",
                holds=median(values) < LIMIT_SECONDS,
            )
            for name, values in times.items()
        ],
    )


if __name__ == "__main__":
    main()
