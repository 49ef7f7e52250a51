"""What can be said to `convoy`, and its help."""

import argparse
from pathlib import Path
from typing import TypeAlias

_FAULTS = ("kill", "stop", "cut", "slow", "fill", "clock", "mend")
_STAGES = ("ingest", "shard", "upload", "train", "evaluate", "register")

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_EPILOG = """\
Run it in a workspace: a folder with params.yaml and dvc.yaml. `convoy init` makes one.
`dvc repro` runs the same stages.  Documentation: README.md and docs/.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line, without loading what it runs."""
    parser = argparse.ArgumentParser(
        prog="convoy",
        description="From a dataset that has borders in it to a registered model.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_flow(commands)
    _add_services(commands)
    _add_pages(commands)
    _add_remotes(commands)
    _add_residency(commands)
    _add_keys(commands)
    _add_init(commands)
    _add_checkpoints(commands)
    _add_verify(commands)
    _add_simulate(commands)
    _add_audit(commands.add_parser("audit", help="the access log: verify, show, prove"))
    return parser


def _add_flow(commands: _Commands) -> None:
    run = commands.add_parser("run", help="run the flow here, stages that are up to date excepted")
    run.add_argument("--force", action="store_true", help="run every stage, up to date or not")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a value in params.yaml first, for example train.steps=50; may be repeated",
    )
    run.add_argument("--json", action="store_true", help="print the result as JSON")

    stage = commands.add_parser("stage", help="run one stage, as dvc.yaml does")
    stage.add_argument("name", choices=_STAGES, metavar="NAME", help=", ".join(_STAGES))
    stage.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_services(commands: _Commands) -> None:
    up = commands.add_parser(
        "up", help="start a Prefect server, an MLflow server and the served deployment"
    )
    free = "another one when it is taken (%(default)s)"
    up.add_argument("--prefect-port", type=int, default=4200, metavar="PORT", help=free)
    up.add_argument("--mlflow-port", type=int, default=5000, metavar="PORT", help=free)

    commands.add_parser(
        "env",
        help="what prefect, mlflow and dvc need to know of this workspace, for the shell: "
        'eval "$(convoy env)"',
    )

    commands.add_parser("serve", help="serve the deployment alone: schedule and UI form")

    reconcile = commands.add_parser(
        "reconcile", help="tell MLflow what it missed; mark dead runs in Prefect, to go on"
    )
    reconcile.add_argument("--json", action="store_true", help="print what was done as JSON")


def _add_pages(commands: _Commands) -> None:
    status = commands.add_parser("status", help="the last runs, the champion, what is stale")
    status.add_argument("--json", action="store_true", help="print it as JSON")

    report = commands.add_parser("report", help="write one offline HTML page for the last run")
    report.add_argument("--output", type=Path, metavar="FILE", help="artifacts/report/index.html")

    commands.add_parser("profile", help="write one offline HTML page: which rank waits for which")


def _add_remotes(commands: _Commands) -> None:
    push = commands.add_parser(
        "push", help="raw input to the DVC remotes of the regions where it may be"
    )
    push.add_argument("regions", nargs="*", metavar="REGION", help="all regions when none")
    push.add_argument("--json", action="store_true", help="print what was done as JSON")

    pull = commands.add_parser("pull", help="the raw input that may be here, from those remotes")
    pull.add_argument("--json", action="store_true", help="print what was done as JSON")


def _add_residency(commands: _Commands) -> None:
    residency = commands.add_parser("residency", help="what may be where, and why")
    verbs = residency.add_subparsers(dest="verb", required=True, metavar="VERB")

    check = verbs.add_parser(
        "check",
        help="every crossing with its verdict and rule; exit status 1 if the flow lacks one",
    )
    check.add_argument("--json", action="store_true", help="print it as JSON")

    explain = verbs.add_parser("explain", help="why an object is where it is")
    explain.add_argument(
        "object",
        metavar="OBJECT",
        help="a shard's file name, digest or name in a store, a path, or models:/NAME/VERSION",
    )
    explain.add_argument("--json", action="store_true", help="print it as JSON")


def _add_keys(commands: _Commands) -> None:
    keys = commands.add_parser("keys", help="rotate, shred and list the keys of the regions")
    verbs = keys.add_subparsers(dest="verb", required=True, metavar="VERB")

    rotate = verbs.add_parser(
        "rotate", help="wrap every data key by its region's present wrapping key; shards stay"
    )
    rotate.add_argument("regions", nargs="*", metavar="REGION", help="all regions when none")
    rotate.add_argument("--json", action="store_true", help="print what was done as JSON")

    shred = verbs.add_parser("shred", help="make a dataset unreadable in a region, for good")
    shred.add_argument("dataset", metavar="DATASET")
    shred.add_argument("region", metavar="REGION")
    shred.add_argument(
        "--version", metavar="V", help="one version, by its first digits; all when not given"
    )
    shred.add_argument("--yes", action="store_true", help="do not ask: for machines")
    shred.add_argument("--json", action="store_true", help="print what was done as JSON")

    listed = verbs.add_parser("list", help="which dataset versions have a key, and where")
    listed.add_argument("--json", action="store_true", help="print it as JSON")


def _add_init(commands: _Commands) -> None:
    init = commands.add_parser("init", help="write a working start from a data file")
    init.add_argument("name", metavar="NAME", help="the new folder, dataset and module")
    init.add_argument(
        "--from",
        dest="source",
        type=Path,
        required=True,
        metavar="FILE",
        help="jsonl, csv, parquet or text",
    )
    whose = init.add_mutually_exclusive_group()
    whose.add_argument(
        "--jurisdiction-field", metavar="FIELD", help="the field that says whose law binds a record"
    )
    whose.add_argument("--jurisdiction", metavar="J", help="one jurisdiction for all records")
    init.add_argument(
        "--target", metavar="FIELD", help="the field to predict; none: model the text"
    )
    init.add_argument(
        "--group",
        metavar="UNION",
        help="one jurisdiction for all countries of a union: EU",
    )
    init.add_argument("--train-in", metavar="J", help="the jurisdiction where training reads")


def _add_checkpoints(commands: _Commands) -> None:
    checkpoints = commands.add_parser(
        "checkpoints", help="the states that training can go on from; `export` one as a file"
    )
    checkpoints.add_argument("--json", action="store_true", help="print it as JSON")
    verbs = checkpoints.add_subparsers(dest="verb", metavar="VERB")
    export = verbs.add_parser("export", help="write one's parameters as a safetensors file")
    export.add_argument("output", type=Path, metavar="FILE")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="that of this step; else the newest")
    which.add_argument("--best", action="store_true", help="that of the lowest training loss")
    export.add_argument("--run", metavar="RUN", help="its first letters, if there are several runs")
    export.add_argument("--json", action="store_true", help="print what was written as JSON")


def _add_verify(commands: _Commands) -> None:
    verify = commands.add_parser("verify", help="prove on this machine what the docs promise")
    verbs = verify.add_subparsers(dest="verb", required=True, metavar="VERB")
    resume = verbs.add_parser(
        "resume",
        help="kill and resume a short training of this workload; exit status 1 unless it ends as "
        "an undisturbed one, to the bit",
    )
    resume.add_argument("--steps", type=int, default=40, metavar="N", help="how long each trains")
    resume.add_argument("--seed", type=int, metavar="N", help="of the moments to kill at")
    resume.add_argument("--json", action="store_true", help="print it as JSON")


def _add_simulate(commands: _Commands) -> None:
    simulate = commands.add_parser(
        "simulate", help="train while nodes die, stop, are cut off, slow or full"
    )
    verbs = simulate.add_subparsers(dest="verb", required=True, metavar="VERB")
    run = verbs.add_parser(
        "run", help="train under a scenario; exit status 1 if the training does not survive it"
    )
    run.add_argument(
        "scenario", type=Path, nargs="?", metavar="FILE", help="YAML; without it nothing happens"
    )
    run.add_argument(
        "--record", type=Path, metavar="FILE", help="write what happened, to be run again"
    )
    run.add_argument("--json", action="store_true", help="print it as JSON")
    fault = verbs.add_parser("fault", help="do something to the simulation that runs here")
    fault.add_argument("kind", choices=_FAULTS, metavar="FAULT", help=", ".join(_FAULTS))
    fault.add_argument("target", metavar="TARGET", help="node-0, node-1, ...; or rank-0, ...")
    fault.add_argument("--seconds", type=float, metavar="S", help="undo it after so long")
    fault.add_argument("--mbit", type=float, metavar="N", help="for slow: megabits a second")
    fault.add_argument("--move", type=float, metavar="S", help="for clock: by so many seconds")
    fault.add_argument("--json", action="store_true", help="print what was done as JSON")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    verify = actions.add_parser("verify", help="is it whole? exit status 1 if it is not")
    show = actions.add_parser("show", help="its entries")
    prove = actions.add_parser("prove", help="write a proof for docs/verify_entry.py, as JSON")
    checkpoint = actions.add_parser("checkpoint", help="sign what it is now and copy that outside")
    actions.add_parser("rotate", help="hand it over to a new signing key, and print that")
    key = actions.add_parser("key", help="print the key that its checkpoints are checked with")
    for action in (verify, show, prove):
        action.add_argument("--log", type=Path, metavar="FILE", help="another log than this one's")
    for action in (verify, prove, checkpoint, key):
        action.add_argument("--key", metavar="KEY", help="check with this key, and no other")
    for action in (verify, show):
        action.add_argument("--json", action="store_true", help="print JSON")
    show.add_argument("--object", metavar="TEXT", help="objects whose name holds this")
    show.add_argument("--region", metavar="NAME")
    show.add_argument("--actor", metavar="NAME")
    show.add_argument("--decision", choices=("allowed", "refused"))
    show.add_argument("--since", metavar="TIME", help="from this time on, UTC if it says no zone")
    show.add_argument("--until", metavar="TIME", help="before this time")
    prove.add_argument("entry", type=int, nargs="?", metavar="ENTRY", help="its number, from 0")
    prove.add_argument(
        "--extends", type=int, metavar="SIZE", help="prove that the log extends this checkpoint"
    )
    prove.add_argument("--output", type=Path, metavar="FILE", help="instead of the terminal")
