"""The `convoy` command. Each subcommand loads what it needs when it is called."""

import atexit
import gc
import importlib
import signal
import sys
from pathlib import Path
from types import FrameType

from flows.arguments import build_parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 done, 1 an error that the message explains, 130 interrupted."""
    options = build_parser().parse_args(arguments)
    _spare_collections()
    signal.signal(signal.SIGTERM, _terminate)
    from flows.environment import prepare_environment
    from storage.errors import ConvoyError

    prepare_environment(Path.cwd())
    command = importlib.import_module(f"flows.commands.{options.command}")
    try:
        code: int = command.main(options)
    except ConvoyError as error:
        if error.detail is not None and error.detail.is_file():
            print(error.detail.read_text(encoding="utf-8"), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        _print_notes(error)
        return 1
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        _print_notes(interrupt)
        return 130
    return code


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        print(f"note: {note}", file=sys.stderr)


def _spare_collections() -> None:
    """Have the garbage collector look less often at what large libraries keep to the end.

    Loading Prefect, DVC, torch and MLflow makes a million objects that stay. Walking them took a
    quarter of the time to load them, and more than a second at the end of the process.
    """
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End by an exception, so that workers are ended and MLflow is told KILLED."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
