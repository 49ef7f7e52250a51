"""The log of a run's steps: one line of JSON for each logged step, of the whole and of each rank.

`steps.jsonl` is rank 0's, of all ranks; `steps-RANK.jsonl` is each rank's own. A resumed run goes
on in its own files.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from training.phases import OTHER, PHASES
from training.spec import STEPS_FILE, rank_steps_file
from training.timing import StepTimer

SPLIT = (*PHASES, OTHER)
_COMMUNICATION = SPLIT.index("communication")
_MEMORY = ("peak_rss_bytes", "peak_cuda_bytes")
_RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024


class StepLog:
    """Sums up the steps between two lines; the ranks speak with each other only for a line.

    The split is in seconds a step, the mean of the ranks. `slowest_rank` is the one that worked
    longest, by `slowest_busy_seconds` a step: all but the exposed communication, in which a rank
    waits for the others.
    """

    def __init__(
        self,
        directory: Path,
        resumed_step: int,
        timer: StepTimer,
        device: torch.device,
        num_replicas: int,
    ) -> None:
        self._timer = timer
        self._device = device
        self._num_replicas = num_replicas
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self._losses: list[Tensor] = []
        self._num_targets = 0
        self.last_loss: float | None = None
        """Of the last line, on rank 0."""
        self._own = continue_file(directory / rank_steps_file(self._rank), resumed_step)
        self._joint: TextIOWrapper | None = None
        if self._rank == 0:
            self._joint = continue_file(directory / STEPS_FILE, resumed_step)
            for stale in directory.glob(rank_steps_file("*")):
                if int(stale.stem.rpartition("-")[2]) >= self._num_ranks:
                    stale.unlink()
        timer.take()

    def add(self, loss: Tensor, target: Tensor) -> None:
        """Count a step: its mean loss over this rank's samples and the batch's target.

        Neither is waited for: a GPU may still compute them.
        """
        self._losses.append(loss)
        if target.ndim > 1:
            self._num_targets += target.numel()

    def write(
        self,
        step: int,
        lr: float,
        grad_norm: float,
        num_samples: int,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Mean over ranks and over the steps since the last line, if there were any. Called by
        every rank.

        num_samples: what all ranks use up while each makes a step. more: further fields of the
        line. Ranks need not have made equally many steps; a mean counts each step once.
        """
        counts = self._gather([float(len(self._losses))])[:, 0]
        if not counts.any():
            return
        num_steps, num_targets = max(1, len(self._losses)), self._num_targets
        split = [seconds / num_steps for seconds in self._timer.take().values()]
        loss = sum(torch.stack(self._losses).tolist()) / num_steps if self._losses else 0.0
        memory = measure_peak_memory(self._device)
        own = [loss, num_targets / num_steps, *split, *memory.values()]
        all_ranks = self._gather(own)
        self._losses, self._num_targets = [], 0
        append(self._own, describe_own(step, self._rank, own) | dict(more or {}))
        if self._joint is None:
            return
        head = {"step": step, "lr": lr, "grad_norm": grad_norm}
        line = describe_rows(all_ranks, counts, head, num_samples, self._num_replicas)
        line |= more or {}
        append(self._joint, line)
        self.last_loss = line["loss"]

    def close(self) -> None:
        """Close the files."""
        self._own.close()
        if self._joint is not None:
            self._joint.close()

    def _gather(self, own: list[float]) -> Tensor:
        """The numbers of all ranks, a row for each, on the CPU."""
        row = torch.tensor(own, dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(row) for _ in range(self._num_ranks)]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()


def describe_own(step: int, rank: int, row: Sequence[float]) -> dict[str, float]:
    """A line of a rank's own log. row: its loss, targets and seconds a step by phase, and what
    `measure_peak_memory` gives."""
    split, memory = row[2 : 2 + len(SPLIT)], row[2 + len(SPLIT) :]
    return {
        "step": step,
        "rank": rank,
        "loss": row[0],
        "step_seconds": sum(split),
        **_name(split),
        **dict(zip(_MEMORY, memory, strict=False)),
    }


def describe_rows(
    rows: Tensor,
    counts: Tensor,
    head: Mapping[str, float],
    num_samples: int,
    num_replicas: int,
) -> dict[str, float]:
    """A line of the log of the whole. rows: of each rank, as for `describe_own`. counts: the steps
    that each of them made. head: step, rate and the gradient's norm."""
    # Equal weights are exactly one, so that this changes no number where all step together.
    means = (rows * (counts / counts.mean())[:, None]).mean(0).tolist()
    parts = rows[:, 2 : 2 + len(SPLIT)]
    mean_split = means[2 : 2 + len(SPLIT)]
    step_seconds = sum(mean_split)
    busy = parts.sum(1) - parts[:, _COMMUNICATION]
    slowest = int(busy.argmax())
    line = {
        "step": head["step"],
        "loss": means[0],
        "lr": head["lr"],
        "grad_norm": head["grad_norm"],
        "step_seconds": step_seconds,
        **_name(mean_split),
        "slowest_rank": slowest,
        "slowest_busy_seconds": busy[slowest].item(),
        "samples_per_second": num_samples / step_seconds,
    }
    if means[1]:
        line["tokens_per_second"] = means[1] * num_replicas / step_seconds
    peaks = rows[:, 2 + len(SPLIT) :].amax(0).tolist()
    return line | dict(zip(_MEMORY, peaks, strict=False))


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Bytes that this process held at most: resident, and on its GPU where it has one."""
    peak = {
        "peak_rss_bytes": float(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT_BYTES
        )
    }
    if device.type == "cuda":
        peak["peak_cuda_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return peak


def _name(split: Sequence[float]) -> dict[str, float]:
    return {f"{name}_seconds": seconds for name, seconds in zip(SPLIT, split, strict=True)}


def continue_file(path: Path, resumed_step: int) -> TextIOWrapper:
    """The file with its whole lines up to the step, open for more: a kill can cut the last one."""
    kept: list[str] = []
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= resumed_step]
    pending = path.with_suffix(".tmp")
    pending.write_text("".join(kept))
    pending.rename(path)
    return path.open("a")


def append(file: TextIOWrapper, line: dict[str, float]) -> None:
    # Not forced to the disk: that can take longer than a step, and a run that loses the machine
    # loses at most lines.
    file.write(json.dumps(line) + "\n")
    file.flush()
