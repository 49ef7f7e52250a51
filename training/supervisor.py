"""Starts the workers of a run under torchrun, watches them, and says what went wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from storage.access_log import RUN_ID_VARIABLE
from training.errors import WorkersFailed
from training.memory import ADVICE, count_oom_kills
from training.process import PARENT_VARIABLE
from training.spec import EXIT_CODES_VARIABLE, SPEC_FILE, WorkerSpec, rank_steps_file

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_FULL_BYTES = 64 << 10
"""Free space on a disk below which the workers cannot leave a word."""
_SIGTERM = int(signal.SIGTERM)


class Incident(BaseModel, frozen=True, extra="forbid"):
    """Something that went wrong in a run."""

    cause: Literal["error", "killed", "memory"]
    """`error`: the code raised, a restart would raise again. `killed`: a process was ended.
    `memory`: the kernel ended it for want of memory, and would again."""
    rank: int | None
    """The first rank that failed, when it is known."""
    message: str
    last_step: int
    """The last step that was logged before."""
    seconds: float
    """From the start of the workers to their end."""


def run_workers(
    spec: WorkerSpec, on_step: Callable[[dict[str, float]], None]
) -> tuple[Incident, ...]:
    """Run all workers to the last step; killed ones are started again from the last checkpoint.

    `on_step` gets each logged step. Gives the incidents that were survived. Raises WorkersFailed
    with the first failing rank's own error. Whatever ends this call ends every worker.
    """
    spec_path = spec.run_directory / SPEC_FILE
    spec_path.write_text(spec.model_dump_json(indent=1))
    incidents: list[Incident] = []
    while True:
        incident = _run_once(spec, spec_path, on_step)
        if incident is None:
            return tuple(incidents)
        incidents.append(incident)
        if incident.cause != "killed":
            raise WorkersFailed(
                f"{incident.message}. Logs of all ranks: {_log_directory(spec)}",
                detail=spec.run_directory / f"failure-{incident.rank}.txt",
            )
        if len(incidents) > spec.max_restarts:
            raise WorkersFailed(
                f"the workers were killed {len(incidents)} times, more than train.max_restarts "
                f"{spec.max_restarts} allows; {spec.after_kill}. "
                f"Last: {incident.message}. Logs of all ranks: {_log_directory(spec)}"
            )


def _run_once(
    spec: WorkerSpec, spec_path: Path, on_step: Callable[[dict[str, float]], None]
) -> Incident | None:
    for stale in spec.run_directory.glob("failure-*.json"):
        stale.unlink()
    _exit_codes(spec).unlink(missing_ok=True)
    started = time.monotonic()
    num_oom_kills = count_oom_kills()
    last_step = 0
    logs = _log_directory(spec)
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "torchrun.log").open("ab") as output:
        agent = subprocess.Popen(
            _command(spec, spec_path),
            cwd=spec.root,
            env=_environment(spec),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
        try:
            steps = _follow(spec.run_directory / spec.progress_file, agent)
            for line in steps:
                last_step = int(line["step"])
                on_step(line)
        finally:
            _end(agent)
    if agent.returncode == 0:
        return None
    starved = count_oom_kills() > num_oom_kills
    return _explain(spec, last_step, time.monotonic() - started, starved)


def _command(spec: WorkerSpec, spec_path: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "training.agent",
        "--nnodes=1",
        f"--nproc-per-node={spec.num_workers}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id={uuid.uuid4().hex[:8]}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        f"--log-dir={_log_directory(spec)}",
        "--redirects=3",
        "-m",
        spec.worker,
        str(spec_path),
    ]


def _environment(spec: WorkerSpec) -> dict[str, str]:
    environment = dict(os.environ)
    environment[RUN_ID_VARIABLE] = spec.mlflow_run_id
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment[EXIT_CODES_VARIABLE] = str(_exit_codes(spec))
    # It would compile every import anew in every worker.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # A `data` folder of the workspace must not hide the package.
    environment["PYTHONSAFEPATH"] = "1"
    # Without it restarted workers can meet the addresses of the dead ones.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _follow(path: Path, agent: subprocess.Popen[bytes]) -> Iterator[dict[str, float]]:
    """Lines added to the step log from now on, until the agent ends."""
    offset: int | None = None
    while True:
        running = agent.poll() is None
        if path.exists():
            content = path.read_bytes()
            if offset is None or offset > len(content):
                offset = 0
            whole = content[offset : content.rfind(b"\n") + 1]
            offset += len(whole)
            for line in whole.splitlines():
                yield json.loads(line)
        if not running:
            return
        time.sleep(_POLL_SECONDS)


def _end(agent: subprocess.Popen[bytes]) -> None:
    """SIGTERM lets torchrun end its workers; they die with it in any case."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


def _explain(spec: WorkerSpec, last_step: int, seconds: float, starved: bool) -> Incident:
    """What happened. starved: the kernel has ended a process for want of memory meanwhile."""
    first = find_cause(spec.run_directory)
    if first is not None:
        return Incident(
            cause="error",
            rank=first["rank"],
            message=f"rank {first['rank']} failed: {first['message']}",
            last_step=last_step,
            seconds=seconds,
        )
    if shutil.disk_usage(spec.run_directory).free < _FULL_BYTES:
        return Incident(
            cause="error",
            rank=None,
            message=f"the disk of {spec.run_directory} is full: make room; {spec.after_kill}",
            last_step=last_step,
            seconds=seconds,
        )
    codes = _read_exit_codes(spec)
    # Those that lost a peer are ended by torchrun with SIGTERM, or by gloo's error.
    killed = sorted(rank for rank, number in codes.items() if number < 0 and -number != _SIGTERM)
    who = "the workers ended"
    if killed:
        who = f"rank {killed[0]} was ended by {signal.Signals(-codes[killed[0]]).name}"
    if starved and killed and codes[killed[0]] == -signal.SIGKILL:
        peaks = _read_peak_bytes(spec.run_directory)
        held = f"; the workers held up to {max(peaks) / 2**20:,.0f} MiB each" if peaks else ""
        return Incident(
            cause="memory",
            rank=killed[0],
            message=f"{who} after step {last_step}, because the machine ran out of memory{held}. "
            f"What would help: {ADVICE}. {spec.after_kill}",
            last_step=last_step,
            seconds=seconds,
        )
    return Incident(
        cause="killed",
        rank=killed[0] if killed else None,
        message=f"{who} after step {last_step}",
        last_step=last_step,
        seconds=seconds,
    )


def find_cause(directory: Path) -> dict[str, Any] | None:
    """What the first rank left that failed by itself, and not because it lost another one."""
    found = [_read_json(path) for path in directory.glob("failure-*.json")]
    failures = sorted(filter(None, found), key=lambda failure: float(failure["time"]))
    return next((failure for failure in failures if not failure["peer_lost"]), None)


def _read_peak_bytes(directory: Path) -> list[float]:
    """The memory that each rank's step log says it held at most."""
    peaks = []
    for path in directory.glob(rank_steps_file("*")):
        if lines := path.read_bytes().splitlines():
            peaks.append(json.loads(lines[-1])["peak_rss_bytes"])
    return peaks


def _read_exit_codes(spec: WorkerSpec) -> dict[int, int]:
    """Exit codes of the ranks that failed; none when torchrun itself was killed."""
    codes = _read_json(_exit_codes(spec)) or {}
    return {int(rank): int(number) for rank, number in codes.items()}


def _read_json(path: Path) -> dict[str, Any] | None:
    """What a process left; None when it left nothing, or a full disk took nothing."""
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return content


def _exit_codes(spec: WorkerSpec) -> Path:
    return spec.run_directory / "exit-codes.json"


def _log_directory(spec: WorkerSpec) -> Path:
    return spec.run_directory / "logs"
