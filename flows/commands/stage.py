"""`convoy stage NAME`: one stage, as dvc.yaml calls it."""

import argparse
import os
import signal
import sys
from pathlib import Path

from flows.console import show_progress
from flows.summary import summarize
from pipeline.config import Config
from pipeline.stages import STAGES
from pipeline.workspace import ARTIFACTS, DATASETS, lock_workspace
from storage.errors import ConvoyError
from training.process import die_with_ancestor


def main(options: argparse.Namespace) -> int:
    if os.environ.get("DVC_STAGE") == options.name:
        # DVC that is killed cannot end its stage.
        die_with_ancestor(signal.SIGTERM, "DVC_STAGE")
    config = Config.load()
    try:
        with lock_workspace(Path.cwd(), f"stage {options.name}"), show_progress():
            result = STAGES[options.name](config)
    except ConvoyError as error:
        if os.environ.get("DVC_STAGE") == options.name:
            _tell_removed(options.name, config, error)
        raise
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        print(summarize(result), file=sys.stdout)
    return 0


def _tell_removed(name: str, config: Config, error: ConvoyError) -> None:
    """DVC removes a stage's outputs before it runs the stage, other callers do not."""
    output = DATASETS / config.dataset if name == "ingest" else ARTIFACTS / name
    if output.exists():
        return
    # DVC keeps the large ones, git the small ones.
    back = f"{'dvc checkout' if name in ('ingest', 'train') else 'git checkout --'} {output}"
    error.add_note(
        f"{output} is not there now: `dvc repro` removes what a stage wrote before it runs it. "
        "Mend the cause and run `dvc repro` again, or take back what the last good run left by "
        f"`{back}`. Registered models are not touched"
    )
