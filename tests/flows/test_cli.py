"""The process of the `convoy` command."""

import subprocess
import sys


def test_the_end_of_the_process_walks_no_objects() -> None:
    """After loading torch and MLflow that took more than a second."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 10_000))\n"
        "from flows.cli import main\n"
        "main(['stage', 'ingest'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.stdout == "frozen True\n", done.stderr
