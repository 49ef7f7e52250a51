"""Scenarios of simulated runs as YAML files: read, checked against the run, and written."""

import difflib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.errors import ConfigError
from pipeline.params_file import Loc, ParamsFile, read_mapping
from training.config import TrainConfig
from training.scenario import FAULTS, Fault, Scenario


def read_scenario(path: Path) -> tuple[Scenario, ParamsFile]:
    """A scenario, and its text for further complaints. Raises ConfigError naming file, line, field
    and remedy."""
    file = read_mapping(
        path, "name a scenario file, such as examples/simulation.yaml", "train, disk_mib and faults"
    )
    try:
        scenario = Scenario.model_validate_json(json.dumps(file.content), strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(error, file)) from None
    return scenario, file


def apply_scenario(scenario: Scenario, file: ParamsFile | None, train: TrainConfig) -> TrainConfig:
    """How to train under the scenario. Raises ConfigError for values that do not go together, and
    for faults that such a training cannot have."""
    values = _merge(train.model_dump(mode="json"), scenario.train)
    try:
        changed = TrainConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        assert file
        raise ConfigError(
            "\n".join(
                file.complain(("train", *problem["loc"]), _say(problem))
                for problem in error.errors(include_url=False)
            )
        ) from None
    for number, fault in enumerate(scenario.faults):
        found = _find_problem(fault, changed)
        if found:
            assert file
            field, message = found
            raise ConfigError(file.complain(("faults", number, field), message))
    return changed


def write_scenario(path: Path, scenario: Scenario, comment: str) -> None:
    """Write it so that it can be read again; the comment goes before it."""
    import yaml

    content = scenario.model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    path.write_text(f"# {comment}\n{text}")


def _find_problem(fault: Fault, train: TrainConfig) -> tuple[str, str] | None:
    """The field that such a training cannot have, and why."""
    if fault.node is not None and fault.node >= train.nodes:
        known = ", ".join(map(str, range(train.nodes)))
        return "node", (
            f"there is no node {fault.node}; train.nodes {train.nodes} makes {known}: correct it, "
            "or raise train.nodes"
        )
    if fault.rank is not None and fault.rank >= train.dims.world_size:
        return "rank", f"there is no rank {fault.rank} of {train.dims.world_size}: correct it"
    if fault.step is not None and fault.step > train.steps:
        return "step", f"{fault.step} is after the last step, {train.steps}: lower it"
    return None


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in changes.items():
        inner = merged.get(key)
        if isinstance(value, dict) and isinstance(inner, dict) and key != "model":
            value = _merge(inner, value)
        merged[key] = value
    return merged


def _explain(error: ValidationError, file: ParamsFile) -> str:
    messages = []
    for problem in error.errors(include_url=False):
        loc: Loc = problem["loc"]
        message = _say(problem)
        if problem["type"] == "literal_error" and loc[-1] == "fault":
            message = f"there is no fault '{problem['input']}'; there are {', '.join(FAULTS)}"
        elif problem["type"] == "extra_forbidden":
            message += _suggest(loc)
        elif not loc and ": " in message:  # of a check across faults, which names the place first
            place, message = message.split(": ", 1)
            loc = tuple(int(part) if part.isdigit() else part for part in place.split("."))
        messages.append(file.complain(loc, message))
    return "\n".join(messages)


def _say(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "unknown key"
    if problem["type"] == "missing":
        return "is missing"
    return str(problem["msg"]).removeprefix("Value error, ")


def _suggest(loc: Loc) -> str:
    model: type[BaseModel] = Fault if loc[0] == "faults" else Scenario
    known = list(model.model_fields)
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"
