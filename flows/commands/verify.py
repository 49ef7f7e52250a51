"""`convoy verify resume`: is a killed training, resumed, the same to the bit?"""

import argparse
import json
import secrets
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipeline import workspace
from pipeline.config import Config
from pipeline.recording import recording
from pipeline.verification import verify_resume
from training.resume_plan import ResumeFinding

_MOST_SHOWN = 3


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
    table = Table("case", "killed", "samples", "losses", "parameters", "optimiser", "random", "")
    for one in findings:
        is_exact = not one.loss_tolerance
        table.add_row(
            f"{one.name}\n{one.layout}",
            "\n".join(one.kills),
            _equal("step", one.different_samples),
            _equal("step", one.different_losses)
            if is_exact
            else f"within {one.largest_loss_difference:.1e}\nof {one.loss_tolerance:.0e} allowed",
            _equal("", one.different_parameters) if is_exact else "rounded",
            _equal("", one.different_optimizer) if is_exact else "rounded",
            _equal("rank", one.different_random) if is_exact else "drawn anew",
            "pass" if one.passed else "FAIL",
        )
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(table)
    for one in findings:
        covered = ", ".join(one.covers) or "nothing but plain steps"
        console.print(f"{one.name} covers {covered}; {one.epochs:.1f} epochs", highlight=False)
    console.print(f"again with the same kills: convoy verify resume --seed {seed}", highlight=False)


def _equal(what: str, different: tuple[object, ...]) -> str:
    if not different:
        return "equal"
    shown = ", ".join(str(one) for one in different[:_MOST_SHOWN])
    more = f" and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
    return f"differ: {what} {shown}{more}".replace("  ", " ")
