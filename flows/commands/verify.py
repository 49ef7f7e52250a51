"""`convoy verify resume`: is a killed training, resumed, the same to the bit?"""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline import workspace
from pipeline.config import Config
from pipeline.recording import recording
from pipeline.verification import verify_resume
from training.resume_plan import ResumeFinding

_MOST_SHOWN = 3
_PIPE_WIDTH = 160


def main(options: argparse.Namespace) -> int:
    config = Config.load()
    root = Path.cwd()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    with workspace.lock_workspace(root, "verify resume"), recording(config):
        findings = verify_resume(
            config,
            root,
            steps=options.steps,
            seed=seed,
            on_progress=lambda what: print(what, file=sys.stderr, flush=True),
        ).findings
    passed = all(finding.passed for finding in findings)
    if options.json:
        rows = [{**one.model_dump(mode="json"), "passed": one.passed} for one in findings]
        print(json.dumps({"passed": passed, "seed": seed, "findings": rows}, indent=2))
    else:
        _show(findings, seed)
    return 0 if passed else 1


def _show(findings: tuple[ResumeFinding, ...], seed: int) -> None:
    table = Table("case", "killed", "samples", "losses", "state", "")
    for one in findings:
        table.add_row(
            f"{one.name}\n{one.layout}",
            "\n".join(one.kills),
            _equal("steps", one.different_samples),
            _describe_losses(one),
            _describe_state(one),
            "pass" if one.passed else "FAIL",
        )
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    for one in findings:
        covered = ", ".join(one.covers) or "nothing but plain steps"
        console.print(f"{one.name} covers {covered}; {one.epochs:.1f} epochs", highlight=False)
    console.print(f"the same kills again: convoy verify resume --seed {seed}", highlight=False)


def _describe_losses(one: ResumeFinding) -> str:
    if not one.loss_tolerance or one.different_losses:
        return _equal("steps", one.different_losses)
    return f"within {one.largest_loss_difference:.0e}\n({one.loss_tolerance:.0e} may be)"


def _describe_state(one: ResumeFinding) -> str:
    if one.loss_tolerance:
        return "not compared:\nrounded otherwise"
    different = (*one.different_parameters, *one.different_optimizer)
    if not different and not one.different_random:
        return f"{one.num_tensors} tensors and all\nrandom state equal"
    return "\n".join(
        _equal(what, names)
        for what, names in (("", different), ("random state of ranks", one.different_random))
        if names
    )


def _equal(what: str, different: Sequence[object]) -> str:
    if not different:
        return "equal"
    shown = ", ".join(str(one) for one in different[:_MOST_SHOWN])
    more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
    return f"differ: {what}{' ' if what else ''}{shown}{more}"
