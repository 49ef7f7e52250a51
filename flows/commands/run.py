"""`convoy run`: the flow in this process, by a Prefect that runs, or one for this run alone."""

import argparse
import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.console import say, show_progress
from flows.services import Service, await_healthy, free_port, keep_alive, running
from flows.summary import summarize
from pipeline.checks import check_before_run
from pipeline.config import Config
from pipeline.dvc_locks import restore_lock_file
from pipeline.errors import PipelineError
from pipeline.params import parse_change, set_params
from pipeline.results import read_results
from pipeline.stages import STAGES
from pipeline.versioning import Snapshot, check_repository, find_stale, read_revision
from pipeline.workspace import lock_workspace
from storage.errors import ConvoyError

_POLL_SECONDS = 0.5
# Nobody looks for blocks in this API, and `convoy up` registers them when it starts: some seconds
# with a new database.
_EPHEMERAL = {"PREFECT_API_BLOCKS_REGISTER_ON_START": "false"}


def main(options: argparse.Namespace) -> int:
    root = Path.cwd()
    with lock_workspace(root, "convoy run"):
        restore_lock_file(root)
        if options.set:
            _set(root, dict(parse_change(text) for text in options.set))
        else:
            Config.load()
        check_repository(root, require_clean=False)
        say("looking which stages are up to date")
        # To do nothing takes no Prefect.
        stale = options.force or any(find_stale(root, name) for name in STAGES)
    if stale:
        with _telling_what_stays(options.set):
            snapshot = _run_flow(options.force)
    else:
        snapshot = Snapshot(revision=read_revision(root), stages=())
    if options.json:
        print(snapshot.model_dump_json(indent=2))
        return 0
    if not stale:
        print("nothing to do: all stages are up to date. What they left:")
    for result in read_results().values():
        print(summarize(result))
    ran = ", ".join(snapshot.stages) or "nothing"
    print(
        f"ran: {ran}\nrevision: git {snapshot.revision.git[:12]}, dvc {snapshot.revision.dvc[:12]}"
    )
    print("next: `convoy report` writes a page, `convoy status` names the champion")
    return 0


def _set(root: Path, changes: dict[str, Any]) -> None:
    """Write the values into params.yaml, unless a run with them would be refused at its start."""
    path = Path("params.yaml")
    before = path.read_bytes()
    config = set_params(path, changes)
    try:
        check_before_run(config, root)
    except ConvoyError as error:
        path.write_bytes(before)
        error.add_note(f"{path} is as it was: the values of --set were taken back")
        raise


@contextlib.contextmanager
def _telling_what_stays(changes: list[str]) -> Iterator[None]:
    """Says with a failure that the values of --set stand in params.yaml."""
    try:
        yield
    except (ConvoyError, KeyboardInterrupt) as error:
        if changes:
            error.add_note(
                f"params.yaml keeps {', '.join(changes)}: --set another value, or take it back by "
                "`git checkout params.yaml`"
            )
        if isinstance(error, KeyboardInterrupt):
            error.add_note("`convoy run` goes on from the last finished stage and checkpoint")
        raise


def _run_flow(force: bool) -> Snapshot:
    say("starting Prefect")
    # Prefect's own lines go to its API; the terminal gets ours.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    if not os.environ.get("PREFECT_API_URL"):
        _start_api()
    from flows.train import train

    with show_progress():
        snapshot = train(force=force)
    assert isinstance(snapshot, Snapshot)  # only a run that continues another ends otherwise
    return snapshot


def _start_api() -> None:
    """Start a Prefect API for this process, and end it at its exit."""
    home = Path(os.environ["PREFECT_HOME"])
    home.mkdir(parents=True, exist_ok=True)
    port = free_port(0)
    os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    command = ["flows.ephemeral", str(port)]
    stack = contextlib.ExitStack()
    # Before Prefect is loaded: what that sends as it ends, the last log lines, then goes first.
    atexit.register(stack.close)
    api = stack.enter_context(running("Prefect", command, home / "ephemeral.log", _EPHEMERAL))
    import flows.train  # noqa: F401  # it loads while the API starts

    await_healthy(api, f"{os.environ['PREFECT_API_URL']}/health")
    ended = threading.Event()
    stack.callback(ended.set)
    threading.Thread(target=_keep_alive, args=(api, ended), name="api", daemon=True).start()


def _keep_alive(api: Service, ended: threading.Event) -> None:
    """Start the API again when it is killed, until it dies too often: the run then does without."""
    while not ended.wait(_POLL_SECONDS):
        try:
            keep_alive(api)
        except PipelineError as error:
            say(str(error))
            return
