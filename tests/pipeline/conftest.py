"""One prepared workspace, copied for each test that breaks something in it."""

import shutil
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.stages import STAGES
from storage.errors import ConvoyError
from tests.workspaces import Workspace, make_workspace, upload_shards


@pytest.fixture(scope="session")
def uploaded(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace after ingest, shard and upload. Copy it; do not touch it."""
    workspace = make_workspace(tmp_path_factory.mktemp("uploaded") / "w")
    upload_shards(workspace)
    return workspace


@pytest.fixture
def work(
    uploaded: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    """A copy of the uploaded workspace, as current directory."""
    path = tmp_path / "w"
    shutil.copytree(uploaded.path, path, symlinks=True)
    monkeypatch.chdir(path)
    yield Workspace(path, uploaded.environment)
    forget_workload()


def forget_workload() -> None:
    """Each test has its own file of that name, and a process imports a name once."""
    sys.modules.pop("toy_workload", None)


def edit(path: Path, old: str, new: str) -> None:
    """Replace a part of a text file that must be there."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    forget_workload()


def contents() -> dict[str, bytes]:
    """Every file that a refused stage must leave as it is. The probe object tells a store works."""
    return {
        str(path): path.read_bytes()
        for top in ("params.yaml", "datasets", "artifacts", ".convoy/stores", ".convoy/keys")
        for path in sorted([Path(top), *Path(top).rglob("*")])
        if path.is_file() and path.name != "convoy-probe"
    }


def refuse(stage: str, *words: str) -> str:
    """Run a stage that must refuse: by a ConvoyError that says all these words, with nothing lost.

    Gives all that a log would show of the error, causes included.
    """
    before = contents()
    with pytest.raises(ConvoyError) as refused:
        STAGES[stage](Config.load())
    for word in words:
        assert word in str(refused.value)
    assert contents() == before
    assert not [p for p in Path("artifacts").glob(".*") if p.name != ".gitignore"]
    return "".join(traceback.format_exception(refused.value))
