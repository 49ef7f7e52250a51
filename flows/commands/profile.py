"""`convoy profile`: one offline HTML page that shows which rank waits for which."""

import argparse
from pathlib import Path

from pipeline.config import Config
from pipeline.profile_page import write_profile


def main(options: argparse.Namespace) -> int:
    path = write_profile(Config.load(), Path.cwd())
    print(path)
    return 0
