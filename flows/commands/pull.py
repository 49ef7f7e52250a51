"""`convoy pull`: the raw input that may be here, from the DVC remotes."""

import argparse
from pathlib import Path

from flows.summary import describe_movement
from pipeline.config import Config
from pipeline.recording import recording
from pipeline.remotes import pull
from pipeline.workspace import lock_workspace


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    with lock_workspace(Path.cwd(), "convoy pull"), recording(config):
        done = pull(config)
    if options.json:
        print(done.model_dump_json(indent=2))
    else:
        for line in describe_movement("from", done):
            print(line)
    return 0 if done.moved else 1
