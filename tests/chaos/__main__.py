"""`python -m tests.chaos --seed N --runs M`: whole flows while their processes die.

Each fault is one line, and a table by kind comes last. Whoever fails keeps its workspace, with all
logs, and is had again with its seed. Writes artifacts/chaos/SEED.json.
"""

import argparse
import json
import signal
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from flows.environment import prepare_environment
from tests.chaos.plan import WORLDS
from tests.chaos.runs import Outcome, run_batch

WHERE = Path("artifacts/chaos")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--world-faults", type=int, default=6, help="a run")
    parser.add_argument("--other-faults", type=int, default=2, help="a run")
    parser.add_argument("--world", choices=WORLDS, default="restored", help="what goes on")
    parser.add_argument("--servers", action="store_true", help="stores on S3, keys in OpenBao")
    parser.add_argument("--only", default="", help="draw kinds with this in their names: kill")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends the servers too
        signal.signal(number, signal.default_int_handler)
    prepare_environment(Path("/nonexistent"))
    outcomes = run_batch(
        options.seed,
        options.runs,
        (options.world_faults, options.other_faults),
        world=options.world,
        with_servers=options.servers,
        only=options.only,
        tell=lambda line: print(line, flush=True),
    )
    _print_table(outcomes)
    WHERE.mkdir(parents=True, exist_ok=True)
    servers, world = "-servers" * options.servers, f"-{options.world}".replace("-restored", "")
    name = f"{options.seed}{servers}{world}.json"
    content = {"options": vars(options), "runs": [asdict(outcome) for outcome in outcomes]}
    (WHERE / name).write_text(json.dumps(content, indent=1))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _print_table(outcomes: list[Outcome]) -> None:
    done: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    for outcome in outcomes:
        for happened in outcome.happened:
            done[happened.fault.kind.name] += 1
            wrong[happened.fault.kind.name] += bool(outcome.wrong)
    print(f"\n{'kind':<20} {'done':>5} {'in runs that went wrong':>24}")
    for kind, number in sorted(done.items()):
        print(f"{kind:<20} {number:>5} {wrong[kind]:>24}")
    num_wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{'all':<20} {done.total():>5}   in {len(outcomes)} runs, {num_wrong} went wrong")


if __name__ == "__main__":
    sys.exit(main())
