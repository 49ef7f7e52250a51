"""The parity table sees what is wrong, and its points are parameters alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from pipeline.config import Config
from tests import parity
from tests.training.parallel_steps import Steps
from tests.workspaces import ROOT

POINTS = {point.name: point for point in (*parity.DEGREES, *parity.VARIANTS)}


@pytest.fixture(scope="module")
def references() -> parity.References:
    return parity.References(parity.OPTIMIZERS)


# tests/training/test_parallel.py has the others under SGD.
@pytest.mark.parametrize("name", ["DDP 4", "FSDP x TP"])
def test_points_hold(references: parity.References, name: str) -> None:
    found = parity.measure(POINTS[name], references)
    assert found.keys() == {"sgd", "adamw"}
    for optimizer, difference in found.items():
        assert parity.is_within(POINTS[name], optimizer, difference), (optimizer, difference)
        assert difference.gradient > 0


def test_one_process_is_itself_to_the_bit(references: parity.References) -> None:
    found = parity.measure(POINTS["one process, again"], references)
    assert set(found.values()) == {parity.Difference(0, 0, 0, 0)}


@pytest.mark.parametrize("what", ["losses", "norms", "gradients", "parameters"])
def test_a_small_error_is_seen(references: parity.References, what: str) -> None:
    point = POINTS["DDP 2"]
    right = references.find(point)["sgd"]
    value: Any = getattr(right, what)
    if isinstance(value, list):
        wrong: Any = [value[0], value[1] * (1 + 1e-5), *value[2:]]
    else:
        wrong = value | {
            "layers.0.attention.wq.weight": value["layers.0.attention.wq.weight"] + 1e-5
        }
    found = parity.compare(replace(right, **{what: wrong}), right, references.start)
    assert not parity.is_within(point, "sgd", found)
    assert [bool(each) for each in found] == [
        name == what for name in ("losses", "norms", "gradients", "parameters")
    ]


def test_ranks_that_hold_the_same_must_agree() -> None:
    def rank(number: float, name: str) -> Steps:
        held = {name: np.array([number], np.float32)}
        return Steps([1.0], [2.0], held, held)

    assert parity.join([rank(1, "a"), rank(2, "b")]).gradients.keys() == {"a", "b"}
    with pytest.raises(AssertionError, match="a"):
        parity.join([rank(1, "a"), rank(1 + 1e-7, "a")])


def test_every_point_is_a_part_of_params_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the main job would read, with these settings under `train`."""
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert len(POINTS) == len(parity.DEGREES) + len(parity.VARIANTS)
    for point in POINTS.values():
        train = params["train"] | point.settings
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(params | {"train": train}), "utf-8")
        config = Config.load(tmp_path / "params.yaml").train
        assert config.dims == point.configure("sgd").dims


def test_the_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "parity.md").read_text(encoding="utf-8"), encoding="utf-8")
    for lines in (["| old |"], ["| new |", "|---|"]):
        parity.write_page(page, lines)
    text = page.read_text(encoding="utf-8")
    assert "\n\n| new |\n|---|\n\n" in text
    assert "| old |" not in text
    assert text.startswith("# Parity\n")
