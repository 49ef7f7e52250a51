"""What MLflow is to be told of a run: on disk until it has been told.

So a server that is away loses nothing and keeps no step waiting, and neither does a death of this
process: what was not sent is sent by the next one. Sending something twice changes nothing, for
each metric carries the time at which it was first noted.
"""

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from training.errors import RegistryError
from training.tracking import RunStatus, check_tracking, end_run, open_client

_MAX_METRICS = 1000
"""In one request, by MLflow's own limit."""
_FLUSH_SECONDS = 30.0
_INTERRUPTED_SECONDS = 3.0
_GATHER_SECONDS = 5.0
"""In which more may come, before what is there is sent: a call costs far more than a line does."""
_PAUSES_SECONDS = (0.5, 1.0, 2.0, 5.0)

Entry = dict[str, Any]


class Outbox:
    """What one run has for MLflow. One process has it at a time; the kernel drops the lock. Raises
    BlockingIOError when another one has it and is not to be waited for."""

    def __init__(self, directory: Path, run_id: str, *, wait: bool = True) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.run_id = run_id
        self.path = directory / f"{run_id}.jsonl"
        self._sent = directory / f"{run_id}.sent"
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise
        whole = self.path.read_bytes().rpartition(b"\n")
        os.ftruncate(self._file, len(whole[0] + whole[1]))  # a kill can cut the last line
        entries: list[Entry] = [json.loads(line) for line in whole[0].splitlines()]
        self._offset = int(self._sent.read_text()) if self._sent.exists() else 0
        self.last_step: float = max((e["step"] for e in entries if "step" in e), default=-1)
        """Of the metrics that were noted."""
        self._finished = any(e.get("status") == "FINISHED" for e in entries)
        self._closed = False

    def note_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Note metrics, of a step or of the whole run."""
        self._append({"metrics": dict(metrics)} | ({} if step is None else {"step": step}))
        self.last_step = max(self.last_step, -1 if step is None else step)

    def note_end(self, status: RunStatus) -> None:
        """Note how the run ended."""
        self._append({"status": status})

    def deliver(self, tracking_uri: str, answer_seconds: float = 10.0) -> None:
        """Send what was not sent, to a server that answers in time. Raises RegistryError when
        MLflow is away; standard error is told what it refuses, which is left out.
        """
        while batch := self._read_batch():
            entries, end = batch
            check_tracking(tracking_uri, answer_seconds)
            if not _send(tracking_uri, self.run_id, entries):
                self._tell_left(f"MLflow at {tracking_uri} has no run {self.run_id}")
                return
            self._note_sent(end)
            self._finished |= entries[-1].get("status") == "FINISHED"

    def deliver_for(self, tracking_uri: str, seconds: float) -> bool:
        """Send what was not sent, for at most about so long. Gives whether all of it was; if not,
        standard error is told where it is."""
        deadline = time.monotonic() + seconds
        for pause in _pauses():
            try:
                self.deliver(tracking_uri, min(10.0, max(2.0, seconds)))
            except RegistryError as error:
                if time.monotonic() + pause > deadline:
                    self._tell_left(str(error))
                    return False
                time.sleep(pause)
            else:
                return True
        raise AssertionError

    def close(self) -> None:
        """Let the next process have it. It is removed when all was sent and no step can follow."""
        self._closed = True
        if (self._finished or self.last_step < 0) and self._read_batch() is None:
            self.path.unlink()
            self._sent.unlink(missing_ok=True)
        os.close(self._file)

    def _append(self, entry: Entry) -> None:
        line = json.dumps({**entry, "time": int(time.time() * 1000)}) + "\n"
        os.write(self._file, line.encode())

    def _read_batch(self) -> tuple[list[Entry], int] | None:
        """The next entries that fit in one request, and where they end; None when all are sent."""
        size = os.fstat(self._file).st_size
        content = os.pread(self._file, size - self._offset, self._offset)
        entries: list[Entry] = []
        end, count = self._offset, 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            count += len(entry.get("metrics", ()))
            if entries and (count > _MAX_METRICS or "status" in entry):
                break
            entries.append(entry)
            end += len(line)
            if "status" in entry:
                break
        return (entries, end) if entries else None

    def _note_sent(self, offset: int) -> None:
        if self._closed:
            return
        self._offset = offset
        pending = self._sent.with_suffix(".tmp")
        pending.write_text(str(offset))
        pending.rename(self._sent)

    def _tell_left(self, why: str) -> None:
        print(
            f"{why}. What it is not told yet waits in {self.path}: the next run or "
            "`convoy reconcile` sends it",
            file=sys.stderr,
        )


def deliver_left(directory: Path, tracking_uri: str) -> int:
    """Send what earlier processes left; gives of how many runs. Raises RegistryError when there is
    something to send and MLflow is away."""
    count = 0
    for path in sorted(directory.glob("*.jsonl")):
        if not _has_unsent(path):
            continue
        try:
            outbox = Outbox(directory, path.stem, wait=False)
        except BlockingIOError:
            continue  # a run at work, which sends it itself
        try:
            outbox.deliver(tracking_uri)
            count += 1
        finally:
            outbox.close()
    return count


def _has_unsent(path: Path) -> bool:
    sent = path.with_suffix(".sent")
    return path.stat().st_size > (int(sent.read_text()) if sent.exists() else 0)


def _send(tracking_uri: str, run_id: str, entries: list[Entry]) -> bool:
    """False when MLflow has no such run."""
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    last = entries[-1]
    if "status" in last:
        return end_run(tracking_uri, run_id, last["status"], last["time"])
    metrics = [
        Metric(key, value, entry["time"], entry.get("step", 0))
        for entry in entries
        for key, value in entry["metrics"].items()
    ]
    try:
        open_client(tracking_uri).log_batch(run_id, metrics=metrics)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        if error.error_code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE"):
            raise RegistryError(f"MLflow at {tracking_uri} is away: {error}") from error
        print(f"MLflow refused {len(metrics)} metrics of {run_id}: {error}", file=sys.stderr)
    return True


def _pauses() -> Iterator[float]:
    yield from _PAUSES_SECONDS
    while True:
        yield _PAUSES_SECONDS[-1]


class MetricLogger:
    """Sends step metrics to MLflow from a thread, so that no step waits for the server.

    Loading MLflow, some seconds, happens in the thread too. Leaving the context sends what is
    left, for at most 30 seconds, or three after an interrupt.
    """

    def __init__(self, outbox: Outbox, tracking_uri: str) -> None:
        self._outbox = outbox
        self._tracking_uri = tracking_uri
        self._noted = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def log(self, line: dict[str, float]) -> None:
        """Note the metrics of one step, to be sent."""
        metrics = {name: value for name, value in line.items() if name != "step"}
        self._outbox.note_metrics(metrics, int(line["step"]))
        self._noted.set()

    def __enter__(self) -> "MetricLogger":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._noted.set()
        interrupted = kind is not None and not issubclass(kind, Exception)
        self._thread.join(_INTERRUPTED_SECONDS if interrupted else _FLUSH_SECONDS)

    def _work(self) -> None:
        pauses = _pauses()
        while True:
            self._noted.wait()
            self._closing.wait(_GATHER_SECONDS)
            self._noted.clear()
            closing = self._closing.is_set()
            try:
                self._outbox.deliver(self._tracking_uri)
                pauses = _pauses()
            except RegistryError:
                # It stays in the outbox; a resting server is asked again, ever less often.
                self._closing.wait(next(pauses))
                self._noted.set()
            if closing:
                return


@contextlib.contextmanager
def open_outbox(directory: Path, run_id: str) -> Iterator[Outbox]:
    """The outbox of a run for the length of a block."""
    outbox = Outbox(directory, run_id)
    try:
        yield outbox
    finally:
        outbox.close()
