"""The train stage at different degrees: what changes between them is `params.yaml` alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from tests.training.test_canonical import places
from tests.workspaces import Workspace

__all__ = ["places"]

OWN = (".convoy", "artifacts", "params.yaml")
"""What stages write, and what is changed."""


def read_files(path: Path) -> dict[str, bytes]:
    """Code and all other files of the workspace, that of its link too."""
    files = [*path.glob("*"), *(path / "examples").rglob("*.py"), *path.glob("datasets/**/*")]
    return {str(f): f.read_bytes() for f in files if f.is_file() and f.name not in OWN}


def train(path: Path, dims: dict[str, int]) -> tuple[list[float], dict[str, Any]]:
    """Losses of the steps, and weights."""
    file = path / "params.yaml"
    params = yaml.safe_load(file.read_text(encoding="utf-8"))
    params["train"]["dims"] = dims
    file.write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    Workspace(path, {}).run("convoy", "stage", "train")
    artifacts = path / "artifacts"
    lines = (artifacts / "train/steps.jsonl").read_text(encoding="utf-8").splitlines()
    weights = load_file(artifacts / "train/model.safetensors")
    return [json.loads(line)["loss"] for line in lines], weights


def test_other_degrees_are_other_parameters_and_nothing_else(places: Path) -> None:
    before = read_files(places)
    assert any(name.endswith("place_names.py") for name in before)
    copies = train(places, {"dp_replicate": 2})
    split = train(places, {"dp_replicate": 1, "tp": 2})
    assert read_files(places) == before
    assert split[0] == pytest.approx(copies[0], rel=1e-5)
    assert split[0] != copies[0]  # rounded in another order: it really was another way
    assert split[1].keys() == copies[1].keys()
    furthest = max(float(np.abs(split[1][name] - copies[1][name]).max()) for name in copies[1])
    assert 0 < furthest < 1e-4
