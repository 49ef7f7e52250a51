"""`convoy push`: raw input to the DVC remotes of the regions where it may be."""

import argparse
import sys
from pathlib import Path

from flows.summary import describe_movement
from pipeline.config import Config
from pipeline.recording import recording
from pipeline.remotes import push
from pipeline.workspace import lock_workspace


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    with lock_workspace(Path.cwd(), "convoy push"), recording(config):
        done = push(config, tuple(options.regions))
    if options.json:
        print(done.model_dump_json(indent=2))
    else:
        for line in describe_movement("to", done):
            print(line)
    if options.regions:
        return 0 if done.moved else 1
    if done.homeless:
        print(
            f"error: {', '.join(map(str, done.homeless))} is in no remote. Where jurisdictions may "
            "not be together, let ingest() write a folder for each, named for it, and nothing "
            "beside them",
            file=sys.stderr,
        )
    return 1 if done.homeless else 0
