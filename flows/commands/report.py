"""`convoy report`: one offline HTML page for the last run of the workspace."""

import argparse
from pathlib import Path

from pipeline.report import write_report

from pipeline.config import Config


def main(options: argparse.Namespace) -> int:
    path = write_report(Config.load(), Path.cwd(), options.output)
    print(path)
    return 0
