"""What happens to a copied state beside the training: sealed, committed on disk, then in the store.

Each rank writes its own part in a thread; rank 0 commits what all of them have written.
"""

import errno
import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from storage.errors import ConvoyError
from training.checkpoint_commit import Commit, Found
from training.checkpoint_files import CheckpointFiles
from training.checkpoint_policy import choose_kept
from training.checkpoint_state import Staged, add_places
from training.errors import CheckpointError, NodeDiskFull
from training.hot_order import require_authority
from training.spec import TrainSpec

_log = logging.getLogger(__name__)

METADATA_FILE = "metadata"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def state_file(rank: int) -> str:
    """What a rank wrote of model and optimiser."""
    return f"state-{rank}"


def own_file(rank: int) -> str:
    """A rank's random state and extras."""
    return f"rank-{rank}"


@dataclass(frozen=True)
class Progress:
    """What a commit marker says of the training."""

    step: int
    cursor: int
    loss: float | None
    layout: dict[str, int]
    running_seconds: float
    num_resumes: int


@dataclass(frozen=True)
class Saving:
    """One checkpoint on its way, as this rank sees it."""

    name: str
    progress: Progress
    staged: Staged
    own: Mapping[str, Any]
    metadata: Metadata | None
    """Rank 0's."""


@dataclass(frozen=True)
class _Outcome:
    """How a rank's part ended. Only text goes to the others: an exception may not pickle."""

    value: Any = None
    error: str | None = None
    full: tuple[int, ...] = ()
    """Ranks that found no room on their disk."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread that does not outlive the process."""

    def __init__(
        self, files: CheckpointFiles, spec: TrainSpec, group: "dist.ProcessGroup | None"
    ) -> None:
        self._files = files
        self._spec = spec
        self._group = group
        self._rank = dist.get_rank()
        self._pending: Future[float] | None = None

    def start(self, saving: Saving) -> None:
        """Begin to write. `wait` must have returned since the last call."""
        assert self._pending is None
        pending: Future[float] = Future()
        self._pending = pending

        def run() -> None:
            started = time.monotonic()
            try:
                self._write(saving)
            except BaseException as error:  # handed to the training thread, which raises it
                pending.set_exception(error)
            else:
                pending.set_result(time.monotonic() - started)

        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def wait(self) -> float | None:
        """Return when the last one is whole everywhere; the seconds it took, None without one.

        Raises CheckpointError with what went wrong in any rank.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return pending.result()

    def settle(self, seconds: float) -> None:
        """Give the last one that long to become whole; it is only said when it does not.

        Another error is on its way already.
        """
        if self._pending is None:
            return
        try:
            self._pending.result(seconds)
        except futures.TimeoutError:
            _log.warning("the checkpoint on its way was not whole after %.0f s", seconds)
        except Exception as error:
            _log.warning("the checkpoint on its way did not become whole: %s", error)

    def _write(self, saving: Saving) -> None:
        target = self._files.directory / saving.name
        written = _attempt(lambda: self._write_own(saving))
        committed = self._finish(written, lambda parts: self._commit(saving, parts))
        if committed.error:
            self._files.remove(saving.name)  # no use, and in the way of what is said now
            full = committed.full
            is_alone = self._rank in full and len(full) < dist.get_world_size()
            raise (NodeDiskFull if is_alone else CheckpointError)(
                f"checkpoint {target} could not be written ({committed.error}); the one before it "
                "is whole: make room or mend the disk and run `convoy stage train`, which goes on "
                "from it"
            )
        for name in committed.value:
            self._files.remove(name)
        if self._files.has_store:
            uploaded = _attempt(lambda: self._upload_own(saving.name))
            stored = self._finish(uploaded, lambda _: self._commit_stored(saving.name))
            if stored.error:
                raise CheckpointError(
                    f"checkpoint {target} is whole on this disk and could not be placed in the "
                    f"store: {stored.error}. Mend that, or set train.checkpoint.store to false in "
                    "params.yaml, and run `convoy stage train`, which goes on from it"
                )

    def _finish(self, mine: _Outcome, finish: Callable[[list[Any]], Any]) -> _Outcome:
        """Let rank 0 finish what every rank did its part of; all get how that ended."""
        outcomes: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(mine, outcomes, group=self._group)
        answer: list[Any] = [None]
        if outcomes is not None:
            failed = next((one for one in outcomes if one.error), None)
            full = tuple(rank for one in outcomes for rank in one.full)
            answer[0] = (
                replace(failed, full=full)
                if failed
                else _attempt(lambda: finish([one.value for one in outcomes]))
            )
        dist.broadcast_object_list(answer, src=0, group=self._group)
        outcome: _Outcome = answer[0]
        return outcome

    def _write_own(self, saving: Saving) -> dict[str, Any]:
        """This rank's files; what rank 0 must know of them."""
        own = io.BytesIO()
        torch.save(dict(saving.own), own)
        state, others = state_file(self._rank), own_file(self._rank)
        return {
            "places": {index: (state, *place) for index, place in saving.staged.places.items()},
            "files": {
                state: self._files.write(saving.name, state, saving.staged.pieces),
                others: self._files.write(saving.name, others, [own.getbuffer()]),
            },
        }

    def _commit(self, saving: Saving, parts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rank 0's: the metadata and the marker. Gives the names of those not to be kept."""
        assert saving.metadata is not None
        places = {index: place for part in parts for index, place in part["places"].items()}
        metadata = pickle.dumps(add_places(saving.metadata, places))
        files = {file: size for part in parts for file, size in part["files"].items()}
        files[METADATA_FILE] = self._files.write(saving.name, METADATA_FILE, [memoryview(metadata)])
        progress = saving.progress
        commit = Commit(
            step=progress.step,
            cursor=progress.cursor,
            fingerprint=self._spec.fingerprint,
            identity=self._spec.identity,
            layout=progress.layout,
            loss=progress.loss,
            time=datetime.now(UTC),
            running_seconds=progress.running_seconds,
            num_resumes=progress.num_resumes,
            fencing_token=self._spec.fencing_token,
            files=files,
        )
        require_authority(self._spec, f"checkpoint {saving.name}")
        self._files.commit(saving.name, commit, (*parts[0]["files"], METADATA_FILE))
        return self._not_kept(self._files.find_on_disk(), saving.name)

    def _upload_own(self, name: str) -> None:
        for file in (state_file(self._rank), own_file(self._rank)):
            self._files.upload(name, file)

    def _commit_stored(self, name: str) -> None:
        """Rank 0's: the marker comes last, and what is not kept goes after it."""
        self._files.upload(name, METADATA_FILE)
        self._files.upload_marker(name)
        for old in self._not_kept(self._files.find_in_store(), name):
            self._files.remove_stored(old)

    def _not_kept(self, found: Sequence[Found], newest: str) -> list[str]:
        config = self._spec.config.checkpoint
        kept = choose_kept(found, config.keep, config.keep_best) | {newest}
        return [one.name for one in found if one.name not in kept]


def _attempt(part: Callable[[], Any]) -> _Outcome:
    """How a rank's part ended; every rank must say so, or the others would wait for it."""
    try:
        return _Outcome(value=part())
    except ConvoyError as error:
        return _Outcome(error=str(error))
    except OSError as error:
        full = (dist.get_rank(),) if error.errno in _NO_ROOM else ()
        said = os.strerror(error.errno) if error.errno else type(error).__name__
        return _Outcome(error=said, full=full)
    except Exception as error:
        return _Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
