"""`convoy report`: one offline HTML page for the last run of the workspace."""

import argparse
from pathlib import Path

from pipeline.config import Config
from pipeline.report import write_report


def main(options: argparse.Namespace) -> int:
    path = write_report(Config.load(), Path.cwd(), options.output)
    print(path)
    return 0
