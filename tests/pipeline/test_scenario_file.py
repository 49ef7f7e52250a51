"""Scenarios: what does not fit is refused by file, line and field; what is written can be read."""

from pathlib import Path

import pytest

from flows import arguments
from pipeline.errors import ConfigError
from pipeline.scenario_file import apply_scenario, read_scenario, write_scenario
from tests.workspaces import PARAMS, ROOT
from training.config import TrainConfig
from training.scenario import FAULTS, Fault

TRAIN = TrainConfig.model_validate(PARAMS["train"] | {"nodes": 2})


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        apply_scenario(*read_scenario(path), TRAIN)
    return str(raised.value).replace(str(path), "s.yaml")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "{fault: explode, node: 1, step: 3}",
            "s.yaml:2: faults.0.fault: there is no fault 'explode'; there are kill, stop, cut, "
            "slow, fill, clock, mend",
        ),
        (
            "{fault: kill, node: 2, step: 3}",
            "s.yaml:2: faults.0.node: there is no node 2; train.nodes 2 makes 0, 1: correct it, or "
            "raise train.nodes",
        ),
        ("{fault: kill, rank: 2, step: 3}", "s.yaml:2: faults.0.rank: there is no rank 2 of 2"),
        ("{fault: kill, node: 1, step: 31}", "faults.0.step: 31 is after the last step, 30: lower"),
        ("{fault: kill, node: 1}", "s.yaml:2: faults.0: say when, by step or by second"),
        ("{fault: kill, step: 1}", "faults.0: kill needs a node or a rank, and not both"),
        ("{fault: cut, rank: 1, step: 1}", "cut is done to a node, not to a rank: name its node"),
        ("{fault: slow, node: 1, step: 1}", "s.yaml:2: faults.0: slow needs rate_mbit"),
        ("{fault: cut, node: 1, step: 1, rate_mbit: 1}", "rate_mbit is for slow: leave it out"),
        ("{fault: kill, node: 1, steps: 1}", "faults.0.steps: unknown key; did you mean 'step'?"),
        ("{fault: kill, node: 1, step: 1, step: 2}", "the key is there twice: remove one"),
        ("{fault: kill, node: 1, step: 1, for_seconds: 1}", "kill does not last: leave for_secon"),
    ],
)
def test_a_fault_that_does_not_fit(tmp_path: Path, fault: str, message: str) -> None:
    assert message in refused(tmp_path / "s.yaml", f"faults:\n  - {fault}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  min_nodes: 3\n",
            "s.yaml:1: train: min_nodes 3 is above nodes 2: lower it, or raise nodes",
        ),
        ("train:\n  stps: 3\n", "s.yaml:2: train.stps: unknown key"),
        ("train: {network: {rate_mbit: 3}}\n", "rate_mbit is of the links that namespaces make"),
        ("fault: []\n", "s.yaml:1: fault: unknown key; did you mean 'faults'?"),
        ("- kill\n", "s.yaml: must be a mapping of train, disk_mib and faults"),
    ],
)
def test_a_scenario_that_does_not_fit(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(tmp_path / "s.yaml", text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing: name a scenario file"):
        read_scenario(tmp_path / "s.yaml")


def test_the_example_fits_and_comes_back_as_it_was_written(tmp_path: Path) -> None:
    scenario, file = read_scenario(ROOT / "examples" / "simulation.yaml")
    changed = apply_scenario(scenario, file, TRAIN)
    assert (changed.nodes, changed.min_nodes, changed.network.rate_mbit) == (2, 1, 500.0)
    assert changed.checkpoint.keep == TRAIN.checkpoint.keep  # sections are merged
    write_scenario(tmp_path / "s.yaml", scenario, "Again.")
    assert read_scenario(tmp_path / "s.yaml")[0] == scenario


def test_the_command_line_knows_the_faults() -> None:
    assert arguments._FAULTS == FAULTS


def test_faults_say_what_they_are() -> None:
    assert (
        str(Fault(fault="cut", node=1, for_seconds=2.5)) == "the link of node 1 was cut for 2.5 s"
    )
