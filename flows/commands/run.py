"""`convoy run`: the flow in this process, by an embedded Prefect or the one that runs here."""

import argparse
import os
from pathlib import Path

from flows.console import show_progress
from flows.summary import summarize
from pipeline.config import Config
from pipeline.params import parse_change, set_params
from pipeline.results import read_results
from pipeline.workspace import STATE


def main(options: argparse.Namespace) -> int:
    if options.set:
        set_params(Path("params.yaml"), dict(parse_change(text) for text in options.set))
    else:
        Config.load()  # its errors come before the seconds that Prefect takes to load
    STATE.mkdir(exist_ok=True)  # Prefect makes its home below it, but not its parents
    # Prefect's own lines go to its API; the terminal gets ours.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from flows.train import train

    with show_progress():
        snapshot = train(force=options.force)
    if options.json:
        print(snapshot.model_dump_json(indent=2))
        return 0
    for result in read_results().values():
        print(summarize(result))
    ran = ", ".join(snapshot.stages) or "nothing: all stages were up to date"
    print(
        f"ran: {ran}\nrevision: git {snapshot.revision.git[:12]}, dvc {snapshot.revision.dvc[:12]}"
    )
    print("next: `convoy report` writes a page, `convoy status` names the champion")
    return 0
