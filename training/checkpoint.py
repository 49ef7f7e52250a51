"""Committed, resumable states, written beside the training: sealed, on disk and in the store."""

import io
import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from data.residency import refusal
from data.sealed_shards import SealedShards, record_access
from storage.errors import ConvoyError
from storage.sealed import SealedReader
from training.checkpoint_commit import CHECKPOINTS, Found, store_folder
from training.checkpoint_files import CheckpointFiles
from training.checkpoint_identity import explain_difference
from training.checkpoint_policy import Timetable
from training.checkpoint_random import begin_generators, read_generators, set_generators
from training.checkpoint_state import (
    Stager,
    collect_state,
    copy_tensors,
    load_state,
    restore_state,
)
from training.checkpoint_writer import METADATA_FILE, CheckpointWriter, Progress, Saving, own_file
from training.errors import CheckpointError
from training.spec import TrainSpec

_SETTLE_SECONDS = 20.0
"""What a checkpoint on its way gets when the training ends by an error."""

Extras = Mapping[str, Stateful]


@dataclass(frozen=True)
class Checkpoint:
    """How far a training is."""

    step: int
    """Steps that were done."""
    cursor: int
    """First global sample position that was not used."""
    loss: float | None = None
    """Mean training loss of the last window of the log; rank 0's counts, and the best is kept."""


class Checkpointer:
    """Saves and loads the state of one run. Every rank has one and calls it at the same steps.

    `save` copies the state and returns; a thread seals, writes and commits the copy, on disk and
    then in the store. What goes wrong there is raised by the next call. Its collectives run in
    process groups of their own, so that they never meet the training's.

    reseed: seeds torch's generator in this rank as the start of a training does.
    """

    def __init__(
        self,
        spec: TrainSpec,
        sealed: SealedShards,
        reseed: Callable[[int], object] = torch.manual_seed,
    ) -> None:
        self._spec = spec
        self._sealed = sealed
        self._rank = dist.get_rank()
        self._reseed = reseed
        self._files = CheckpointFiles(
            spec.run_directory / CHECKPOINTS,
            sealed,
            spec.run_directory.name,
            use_store=spec.config.checkpoint.store,
        )
        # The first for the thread that saves, the second for the one that trains.
        self._writer = CheckpointWriter(self._files, spec, dist.new_group(backend="gloo"))
        self._group = dist.new_group(backend="gloo")
        self._stager = Stager(self._group)
        self._attempt: str = self.share(secrets.token_hex(4))
        self._num_saves = 0
        self._num_resumes = 0
        self._table = Timetable(spec.config.checkpoint, self.share)

    def load(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extras: Extras | None = None,
    ) -> Checkpoint | None:
        """Load the newest committed state in place; None when there is none yet.

        In the layout that wrote it every rank gets its own random state and extras back. In
        another one every rank draws anew, from a seed made of the config's and the step, and gets
        rank 0's extras. Raises CheckpointError for a checkpoint of
        another run, and for one that was changed.
        """
        self.close()
        newest: Found | None = self.share(self._find_newest() if self._rank == 0 else None)
        if newest is None:
            return None
        commit = newest.commit
        same = commit.layout == self._layout
        try:
            with open_checkpoint(self._files, newest) as opened:
                state = collect_state(parts, optimizers)
                load_state(state, opened.metadata, opened.open)
                restore_state(state, parts, optimizers)
                own = opened.read_own(self._rank if same else 0)
        except (ConvoyError, OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{self._files.directory / newest.name} cannot be read ({_first_line(error)}): "
                "delete it and run `convoy stage train`, which goes on from its copy in the store "
                "if there is one, or from the one before it"
            ) from error
        for name, extra in (extras or {}).items():
            if name in own["extras"]:
                extra.load_state_dict(own["extras"][name])
        if same:
            set_generators(own["generators"])
        else:
            begin_generators(self._spec.config.seed, commit.step, self._reseed)
        self._num_resumes = commit.num_resumes + 1
        self._table = Timetable(
            self._spec.config.checkpoint,
            self.share,
            running_seconds=commit.running_seconds,
            num_failures=self._num_resumes,
        )
        return Checkpoint(step=commit.step, cursor=commit.cursor, loss=commit.loss)

    def due(self, step: int) -> bool:
        """Whether to save after this step; all ranks get one answer. The last step is due."""
        return self._table.due(step) or step == self._spec.config.steps

    def save(
        self,
        checkpoint: Checkpoint,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        extras: Extras | None = None,
    ) -> None:
        """Begin to save the state, which may change when this returns. Called by every rank.

        Waits for the one before. Raises what went wrong with that, or ResidencyError when the
        store may not have it any more.
        """
        started = time.monotonic()
        self.close()
        self._require_residency()
        staged = self._stager.stage(collect_state(parts, optimizers))
        states = {name: extra.state_dict() for name, extra in (extras or {}).items()}
        self._num_saves += 1
        progress = Progress(
            step=checkpoint.step,
            cursor=checkpoint.cursor,
            loss=checkpoint.loss,
            layout=self._layout,
            running_seconds=self._table.running_seconds,
            num_resumes=self._num_resumes,
        )
        self._writer.start(
            Saving(
                # Never the name of another world's, nor of one that this world wrote before.
                name=f"step-{checkpoint.step:08d}-{self._attempt}{self._num_saves:04d}",
                progress=progress,
                staged=staged,
                own={"generators": read_generators(), "extras": copy_tensors(states)},
                metadata=self._stager.metadata,
            )
        )
        self._table.note(checkpoint.step, time.monotonic() - started)

    def close(self) -> None:
        """Return when the last checkpoint is whole in every place. Raises what went wrong."""
        seconds = self._writer.wait()
        if seconds is not None:
            self._table.note_duration(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close. After an error a checkpoint on its way gets some time, and the error is raised."""
        if error is None:
            self.close()
        else:
            self._writer.settle(_SETTLE_SECONDS)

    def _find_newest(self) -> Found | None:
        self._files.remove_unfinished()
        found = self._files.find()
        if not found:
            return None
        newest = found[-1]
        there, here = newest.commit.fingerprint, self._spec.fingerprint
        where = self._files.directory / newest.name
        if there != here:
            difference = explain_difference(newest.commit.identity, self._spec.identity)
            raise CheckpointError(
                f"{where} is of another run ({there[:12]}, this one is {here[:12]}): its workload, "
                f"manifest or parameters differ{difference}; delete {self._files.directory}"
            )
        self._files.check(newest)
        return newest

    def _require_residency(self) -> None:
        """Ask the policy again: a rule may have expired since the training began."""
        region = self._sealed.region
        for jurisdiction in sorted({s.jurisdiction for s in self._sealed.manifest.of("train")}):
            if not self._spec.residency.decide(jurisdiction, "shard", region.name).allowed:
                continue  # excluded: nothing of it is in the state
            decision = self._spec.residency.decide(jurisdiction, "checkpoint", region.name)
            if not decision.allowed:
                name = store_folder(self._spec.run_directory.name)
                record_access(
                    self._sealed.log,
                    region,
                    "refuse",
                    name,
                    refused=decision.reason,
                    artifact="checkpoint",
                )
                raise refusal(decision)

    @property
    def _layout(self) -> dict[str, int]:
        return self._spec.config.dims.model_dump()

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        answer = [value]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        return answer[0]


@dataclass
class OpenCheckpoint:
    """The files of one checkpoint, each opened once."""

    files: CheckpointFiles
    name: str
    stack: ExitStack
    readers: dict[str, SealedReader] = field(default_factory=dict)

    def open(self, file: str) -> SealedReader:
        """A sealed file of the state."""
        if file not in self.readers:
            self.readers[file] = self.stack.enter_context(self.files.open(self.name, file))
        return self.readers[file]

    @property
    def metadata(self) -> Metadata:
        """What DCP knows of the state. It is unpickled, and was authenticated before."""
        content = self.files.read(self.name, METADATA_FILE)
        metadata: Metadata = pickle.loads(content)
        return metadata

    def read_own(self, rank: int) -> dict[str, Any]:
        """What one rank kept for itself: its random state and extras."""
        content = self.files.read(self.name, own_file(rank))
        own: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
        return own


@contextmanager
def open_checkpoint(files: CheckpointFiles, found: Found) -> Iterator[OpenCheckpoint]:
    """Open a committed checkpoint. Raises what a broken or missing file raises."""
    with ExitStack() as stack:
        yield OpenCheckpoint(files, found.name, stack)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
