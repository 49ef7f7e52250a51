"""A torch.profiler trace of some steps, of each rank, in the run's directory.

It holds names of operations and when they ran: no shapes, no stacks, no value.
"""

from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile, schedule

from training.spec import trace_file

_SKIPPED = 2
"""First steps, which are unlike the others."""


class StepProfiler:
    """Records `num_steps` steps once the first are over; with none it does nothing.

    Leaving the context ends a trace that is not yet whole, where training was shorter.
    """

    def __init__(self, directory: Path, num_steps: int) -> None:
        path = directory / trace_file(dist.get_rank())
        self._profile = None
        if num_steps:
            self._profile = profile(
                schedule=schedule(
                    skip_first=_SKIPPED, wait=0, warmup=1, active=num_steps, repeat=1
                ),
                on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
            )

    def step(self) -> None:
        """Say that a step is over."""
        if self._profile is not None:
            self._profile.step()

    def __enter__(self) -> "StepProfiler":
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.stop()
