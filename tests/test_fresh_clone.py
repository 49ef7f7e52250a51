"""A clone at an old commit trains from the stores; its workers' keys are in their memory alone."""

import base64
import subprocess
import time
from pathlib import Path

import pytest

from data.manifest import read_manifest
from data.sealed_shards import open_region
from pipeline.config import Config
from storage.access_log import AccessLog
from tests.workspaces import PARAMS, Workspace, make_workspace

PLACE = """
from pipeline.config import Config
from pipeline.stages import STAGES
for name in ("ingest", "shard", "upload"):
    STAGES[name](Config.load())
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """At the commit before the present one, of a workspace whose stores have absolute URLs."""
    folder = tmp_path_factory.mktemp("clone")
    regions = {
        name: {
            "jurisdiction": name.upper(),
            "store": f"file:{folder}/stores/{name}",
            "wrapping_key": f"file:{folder}/keys/{name}.key",
        }
        for name in ("eu", "us", "cn")
    }
    train = PARAMS["train"] | {"steps": 10}
    work = make_workspace(folder / "w", regions=regions, train=train)
    git = ["git", "-C", str(work.path)]
    for count in (900, 600):
        work.set("ingest.params", {"count": count})
        work.python(PLACE)
        subprocess.run([*git, "add", "-A"], check=True)
        command = [
            *git,
            "-c",
            "user.name=T",
            "-c",
            "user.email=t@example.org",
            "commit",
            "-qm",
            "x",
        ]
        subprocess.run(command, check=True)
    subprocess.run(["git", "clone", "-q", str(work.path), str(folder / "c")], check=True)
    subprocess.run(["git", "-C", str(folder / "c"), "checkout", "-q", "HEAD~1"], check=True)
    return Workspace(folder / "c", work.environment)


def test_it_trains_and_no_key_leaves_the_memory(
    clone: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(clone.path)
    config = Config.load()
    manifest = read_manifest(Path("artifacts/shard/manifest.json"))
    assert sum(manifest.count_records().values()) == 900
    assert not Path("artifacts/shard/shards").exists()
    opened = open_region(manifest, config.site, AccessLog(Path(".convoy/access/log.jsonl")))
    key: bytes = opened.key
    forms = [key, key.hex().encode(), base64.b64encode(key), base64.urlsafe_b64encode(key)]
    assert not [form for form in forms if form in repr(opened).encode()]

    process = clone.start("convoy", "stage", "train")
    seen: dict[bytes, bytes] = {}
    while process.poll() is None:
        seen |= _read_processes(clone.path)
        time.sleep(0.25)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert sum(b"convoy-rank" in command for command in seen) >= 2
    report = clone.read_json("artifacts/train/report.json")
    trained = {j: n for j, n in manifest.count_records("train").items() if j != "CN"}
    assert report["num_records"] == trained
    files = [p.read_bytes() for p in clone.path.rglob("*") if p.is_file()]
    assert len(files) > 50
    for content in (*files, *seen, *seen.values()):
        assert not [form for form in forms if form in content]


def _read_processes(folder: Path) -> dict[bytes, bytes]:
    """Name, command line and environment of each process that works in the folder."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink().is_relative_to(folder):
                    named = (entry / "comm").read_bytes() + (entry / "cmdline").read_bytes()
                    found[entry.name.encode() + named] = (entry / "environ").read_bytes()
            except OSError:
                continue  # it ended meanwhile, or is another user's
    return found
