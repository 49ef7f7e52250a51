"""`python -m training.resume_check PLAN ANSWER`: does a killed run, resumed, end as if undisturbed?

Every run is a real one, by the trainer, with one process a rank; the processes are forked from this
one, which has loaded torch, so that each takes a second and not ten.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.errors import ConvoyError
from training.checkpoint import open_checkpoint
from training.checkpoint_commit import CHECKPOINTS, Found
from training.checkpoint_files import CheckpointFiles
from training.checkpoint_state import load_whole
from training.config import TrainConfig
from training.errors import TrainingError
from training.process import die_with_parent, read_parent
from training.resume_plan import (
    Kill,
    ResumeCase,
    ResumeFinding,
    ResumeFindings,
    ResumePlan,
    count_batches,
    count_parts,
)
from training.resume_world import last_step, run_world, seen_file, unfinished
from training.spec import STEPS_FILE, TrainSpec

_TRIES = 6
"""How many saves are tried to be killed in, one after another, before it is said that none was."""

Samples = dict[int, list[str]]
"""Digests of a global batch by step."""


def check_case(case: ResumeCase, directory: Path) -> ResumeFinding:
    """Train undisturbed, train with kills, compare. Raises TrainingError when a run fails."""
    reference = _place(case.spec, directory / "undisturbed")
    _say(f"{case.name}: undisturbed")
    if not run_world(reference, 0, None, case.without_dropout):
        raise TrainingError(f"{case.name}: the undisturbed run was killed by somebody else")
    disturbed = _place(case.spec, directory / "disturbed")
    kills: list[str] = []
    starts = [0]
    for kill in case.kills:
        _say(f"{case.name}: to be killed, {kill.when} {kill.step}")
        kills.append(_run_killed(case, disturbed, kill, starts))
    last = disturbed
    if case.then is not None:
        config = case.spec.config.model_copy(update={"dims": case.then})
        last = disturbed.model_copy(update={"config": config})
    _say(f"{case.name}: resumed to the end")
    if not run_world(last, len(starts) - 1, None, case.without_dropout):
        raise TrainingError(f"{case.name}: the resumed run was killed by somebody else")
    return _compare(case, reference, last, kills, starts)


def _run_killed(case: ResumeCase, spec: TrainSpec, kill: Kill, starts: list[int]) -> str:
    """Have the workers killed as told; what happened. `starts` gets the step resumed from next."""
    wanted = kill
    for _ in range(_TRIES):
        if run_world(spec, len(starts) - 1, wanted, case.without_dropout):
            raise TrainingError(
                f"{case.name}: training ended before {kill.when} {kill.step}: take more --steps"
            )
        starts.append(last_step(spec))
        begun = unfinished(spec.run_directory / CHECKPOINTS)
        if kill.when != "save":
            what = f"in step {kill.step}" + (", part 2" if kill.when == "accumulation" else "")
            who = "all" if kill.rank is None else f"rank {kill.rank}"
            return f"{who} {what}, went on from {starts[-1]}"
        if begun:
            step = int(max(begun).split("-")[1])
            return f"all while saving step {step}, went on from {starts[-1]}"
        wanted = kill.model_copy(update={"step": starts[-1] + 1})  # it was whole already: the next
    raise TrainingError(f"{case.name}: no save lasted long enough to be killed in")


def _place(spec: TrainSpec, directory: Path) -> TrainSpec:
    directory.mkdir(parents=True)
    return spec.model_copy(update={"run_directory": directory})


def _compare(
    case: ResumeCase,
    reference: TrainSpec,
    resumed: TrainSpec,
    kills: list[str],
    starts: list[int],
) -> ResumeFinding:
    expected, found = _read_lines(reference), _read_lines(resumed)
    differences = {
        step: _relative(line["loss"], found[step]["loss"]) if step in found else float("inf")
        for step, line in expected.items()
    }
    if case.loss_tolerance:
        losses = [s for s, difference in differences.items() if difference > case.loss_tolerance]
    else:
        keys = ("loss", "lr", "grad_norm")
        losses = [
            step
            for step, line in expected.items()
            if step not in found or any(line[key] != found[step][key] for key in keys)
        ]
    samples = _read_samples(reference, [0], [case.spec.config])
    configs = [case.spec.config] * (len(starts) - 1) + [resumed.config]
    others = _read_samples(resumed, starts, configs)
    state, own, drew = _read_state(reference)
    other_state, other_own, _ = _read_state(resumed)
    differing = [n for n in sorted(state | other_state) if not _equal(state, other_state, n)]
    num_samples = sum(shard.num_records for shard in reference.open_shards()[1])
    epochs = case.spec.config.steps * case.spec.config.global_batch / num_samples
    return ResumeFinding(
        name=case.name,
        layout=_layout(case),
        kills=tuple(kills),
        num_tensors=len(state),
        different_parameters=tuple(n for n in differing if n.startswith("model.")),
        different_optimizer=tuple(n for n in differing if n.startswith("optimizer.")),
        different_random=tuple(
            rank for rank, one in own.items() if case.then is None and other_own[rank] != one
        ),
        different_samples=tuple(s for s in samples if samples[s] != others.get(s)),
        different_losses=tuple(losses),
        largest_loss_difference=max(differences.values()),
        loss_tolerance=case.loss_tolerance,
        epochs=epochs,
        covers=tuple(_coverage(case, expected, epochs, drew)),
    )


def _coverage(
    case: ResumeCase, lines: Mapping[int, Mapping[str, float]], epochs: float, drew: bool
) -> Iterator[str]:
    if epochs > 1:
        yield "an epoch's end"
    if drew:
        yield "dropout"
    if len({line["lr"] for line in lines.values()}) > 1:
        yield "a schedule"
    if case.spec.config.precision != "float32":
        yield "mixed precision"
    if case.spec.config.reproducible:
        yield "virtual ranks"
    elif count_parts(case.spec.config) > 1:
        yield "accumulation"
    how = case.spec.config.synchronize
    if how.is_local or how.compress != "none":
        yield how.mode if how.is_local else how.compress


def _layout(case: ResumeCase) -> str:
    def name(config: Any) -> str:
        degrees = {key: value for key, value in config.model_dump().items() if value > 1}
        return " ".join(f"{key} {value}" for key, value in degrees.items()) or "one worker"

    before = name(case.spec.config.dims)
    return f"{before}, then {name(case.then)}" if case.then else before


def _read_lines(spec: TrainSpec) -> dict[int, dict[str, float]]:
    """The logged steps."""
    lines = map(json.loads, (spec.run_directory / STEPS_FILE).read_text().splitlines())
    return {int(line["step"]): line for line in lines}


def _read_samples(spec: TrainSpec, starts: list[int], configs: list[TrainConfig]) -> Samples:
    """What each step trained on: of the last start that came to a commit after it."""
    samples: Samples = {}
    for attempt, (start, config) in enumerate(zip(starts, configs, strict=True)):
        end = starts[attempt + 1] if attempt + 1 < len(starts) else config.steps
        by_replica = [
            (spec.run_directory / seen_file(attempt, replica * config.dims.tp))
            for replica in range(config.dims.num_replicas)
        ]
        if end == start:
            continue  # nothing of it was committed
        batches, parts = [p.read_text().splitlines() for p in by_replica], count_batches(config)
        for step in range(start + 1, end + 1):
            first = (step - start - 1) * parts
            lines = [line for rank in batches for line in rank[first : first + parts]]
            samples[step] = [one for line in lines for one in json.loads(line)]
    return samples


def _read_state(spec: TrainSpec) -> tuple[dict[str, Tensor], dict[int, str], bool]:
    """The last checkpoint: tensors by name, random state by rank, and whether torch's generator
    was drawn from since the one before."""
    sealed, _ = spec.open_shards()
    files = CheckpointFiles(
        spec.run_directory / CHECKPOINTS, sealed, spec.run_directory.name, use_store=False
    )
    *_, before, newest = files.find()
    ranks = range(spec.num_workers)
    own = {rank: repr(_plain(_read_own(files, newest, rank))) for rank in ranks}
    now, then = (_read_own(files, one, 0)["torch"] for one in (newest, before))
    with open_checkpoint(files, newest) as opened:
        state = load_whole(opened.metadata, opened.open)
    return state, own, not torch.equal(now, then)


def _read_own(files: CheckpointFiles, found: Found, rank: int) -> dict[str, Any]:
    with open_checkpoint(files, found) as opened:
        generators: dict[str, Any] = opened.read_own(rank)["generators"]
    return generators


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _equal(state: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    """By their bits: a NaN equals itself."""
    if name not in state or name not in other or state[name].shape != other[name].shape:
        return False
    one, two = (t[name].contiguous().reshape(-1).view(torch.uint8) for t in (state, other))
    return torch.equal(one, two)


def _relative(expected: float, found: float) -> float:
    return abs(expected - found) / max(abs(expected), abs(found), 1e-12)


def _say(what: str) -> None:
    print(what, flush=True)


def main(plan_path: Path, answer_path: Path) -> None:
    """Check every case; the answer is a file of ResumeFindings."""
    die_with_parent(signal.SIGKILL, read_parent())
    torch.set_num_threads(1)
    plan = ResumePlan.model_validate_json(plan_path.read_bytes())
    findings: list[ResumeFinding] = []
    error = None
    try:
        for number, case in enumerate(plan.cases):
            findings.append(check_case(case, plan.directory / f"case-{number}"))
    except ConvoyError as problem:
        error = str(problem)
    answer = ResumeFindings(findings=tuple(findings), error=error)
    answer_path.write_text(answer.model_dump_json(indent=1))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
