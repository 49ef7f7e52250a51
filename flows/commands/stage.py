"""`convoy stage NAME`: one stage, as dvc.yaml calls it."""

import argparse
import sys
from pathlib import Path

from flows.console import show_progress
from flows.summary import summarize
from pipeline.config import Config
from pipeline.stages import STAGES
from pipeline.workspace import lock_workspace


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    with lock_workspace(Path.cwd(), f"stage {options.name}"), show_progress():
        result = STAGES[options.name](config)
    if options.json:
        print(result.model_dump_json(indent=2))
    else:
        print(summarize(result), file=sys.stdout)
    return 0
