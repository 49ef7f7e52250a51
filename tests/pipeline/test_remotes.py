"""Raw input goes to the DVC remotes of regions where it may be, and comes back."""

import shutil
from pathlib import Path

import pytest

from flows.arguments import build_parser
from flows.commands import pull as pull_command
from flows.commands import push as push_command
from pipeline.config import Config
from pipeline.errors import ConfigError, VersioningError
from pipeline.remotes import Movement, pull, push
from pipeline.stages import STAGES
from pipeline.versioning import commit_stage
from storage.access_log import AccessLog
from tests.workspaces import Workspace

# DVC's own, of its use of pygtrie.
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value will soon:DeprecationWarning")

SPLIT = """

def ingest(destination: Path, count: int = 900) -> None:
    for jurisdiction in ("EU", "US", "CN"):
        (destination / jurisdiction.lower()).mkdir()
        with (destination / jurisdiction.lower() / "sums.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([i, 0.5, i / count, jurisdiction] for i in range(count // 3))


def records(source: Path) -> Iterator[Record]:
    for path in sorted(source.glob("*/sums.csv")):
        with path.open(newline="") as file:
            for number, a, b, jurisdiction in csv.reader(file):
                yield Record({"number": int(number), "a": float(a), "b": float(b)}, jurisdiction)
"""


@pytest.fixture
def split(work: Workspace) -> Workspace:
    """The raw input in a folder for each jurisdiction, sharded, and known to DVC."""
    with (work.path / "toy_workload.py").open("a") as file:
        file.write(SPLIT)
    for stage in ("ingest", "shard"):
        STAGES[stage](Config.load())
        commit_stage(work.path, stage)
    return work


def remote_files(work: Workspace, region: str) -> set[str]:
    """What files lie in a region's remote, by their content."""
    folder = work.path / ".convoy/dvc" / region / "files"
    return {p.read_text() for p in folder.rglob("*") if p.is_file() and p.suffix != ".dir"}


def where(done: Movement) -> set[tuple[str, str]]:
    return {(moved.path.name, moved.region) for moved in done.moved}


def test_each_folder_goes_where_its_jurisdiction_may_be(split: Workspace) -> None:
    raw = {
        name: (split.path / f"datasets/toy/{name}/sums.csv").read_text()
        for name in ("eu", "us", "cn")
    }
    done = push(Config.load())
    assert where(done) == {("eu", "eu"), ("us", "eu"), ("us", "us"), ("cn", "cn")}
    assert not done.homeless
    assert {k.reason for k in done.kept if k.path.name == "cn"} == {
        "no rule lets raw of CN be in eu",
        "no rule lets raw of CN be in us",
    }
    assert remote_files(split, "eu") == {raw["eu"], raw["us"]}
    assert remote_files(split, "us") == {raw["us"]}
    assert remote_files(split, "cn") == {raw["cn"]}
    assert sum(moved.num_sent for moved in push(Config.load()).moved) == 0
    entries = [
        e for e in AccessLog(Path(".convoy/access/log.jsonl")).entries() if e.artifact == "raw"
    ]
    assert {(e.action, e.decision) for e in entries} == {
        ("put", "allowed"),
        ("refuse", "refused"),
        ("cross", "allowed"),
    }

    shutil.rmtree(".dvc/cache")
    shutil.rmtree("datasets/toy")
    done = pull(Config.load())
    assert where(done) == {("eu", "eu"), ("us", "eu")}
    assert [kept.path.name for kept in done.kept] == ["cn"]
    found = {p.parent.name: p.read_text() for p in Path("datasets/toy").rglob("*.csv")}
    assert found == {"eu": raw["eu"], "us": raw["us"]}


def test_a_remote_that_lies_is_not_believed(split: Workspace) -> None:
    split.set("versioning", {"remotes": {"eu": str(split.path / "elsewhere")}})
    push(Config.load(), ("eu",))
    shutil.rmtree(".dvc/cache")
    shutil.rmtree("datasets/toy")
    for path in (split.path / "elsewhere").rglob("*"):
        if path.is_file() and path.suffix != ".dir":
            path.chmod(0o600)
            path.write_text("other records")
    with pytest.raises(
        VersioningError, match=r"1 files of datasets/toy in the remote of region eu are not what"
    ):
        pull(Config.load())
    assert not Path("datasets/toy").exists()


def test_one_folder_of_all_goes_only_where_all_may_be(
    work: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VersioningError, match=r"dvc\.lock does not know datasets/toy"):
        push(Config.load())
    for stage in ("ingest", "shard"):
        commit_stage(work.path, stage)
    assert push_command.main(build_parser().parse_args(["push"])) == 1
    output = capsys.readouterr()
    assert (
        "datasets/toy (CN, EU, US) may not be in eu: no rule lets raw of CN be in eu" in output.out
    )
    assert "datasets/toy is in no remote" in output.err
    assert not Path(".convoy/dvc").exists()
    assert pull_command.main(build_parser().parse_args(["pull"])) == 1
    params = work.params
    for rule in params["residency"]["rules"]:
        rule["regions"] = ["eu", "us", "cn"]
    work.write_params(params)
    assert where(push(Config.load(), ("us",))) == {("toy", "us")}
    with pytest.raises(ConfigError, match="there is no region 'mars'"):
        push(Config.load(), ("mars",))


def test_raw_input_of_another_version_is_not_taken_for_this_one(split: Workspace) -> None:
    split.set("ingest.params", {"count": 300})
    STAGES["ingest"](Config.load())
    commit_stage(split.path, "ingest")
    with pytest.raises(VersioningError, match="run `convoy run` or `dvc repro` first"):
        push(Config.load())
