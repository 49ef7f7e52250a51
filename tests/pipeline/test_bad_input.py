"""Bad input to the stages: refused in words, before anything is spent, with nothing lost."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import workspace
from pipeline.checks import check_before_run
from pipeline.config import Config
from pipeline.errors import VersioningError
from pipeline.stages import STAGES
from pipeline.versioning import read_revision
from storage.errors import ConvoyError
from tests.pipeline.conftest import contents, edit, refuse
from tests.workspaces import Workspace

SECRET = "content-of-a-record"
MODULE = Path("toy_workload.py")

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which root alone may")


@pytest.fixture
def small_disk() -> Iterator[Any]:
    """Mount a tmpfs, by default of so many bytes, on a directory of the test."""
    mounted: list[Path] = []

    def mount(path: Path, num_bytes: int, *options: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={num_bytes}", *options))]
        subprocess.run([*command, "tmpfs", str(path)], check=True)
        mounted.append(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


class TestCommand:
    """What a user sees of all these: one line, exit status 1, no traceback."""

    def test_a_wrong_key(self, work: Workspace) -> None:
        work.set("train.stps", 5)
        output = work.run("convoy", "stage", "ingest", expect=1)
        assert "error: params.yaml:" in output
        assert "train.stps: unknown key; did you mean 'steps'?" in output
        assert "Traceback" not in output

    def test_fewer_nodes_than_at_least(self, work: Workspace) -> None:
        work.set("train.min_nodes", 2)
        output = work.run("convoy", "stage", "train", expect=1)
        assert "error: params.yaml:" in output
        assert "train: min_nodes 2 is above nodes 1: lower it, or raise nodes" in output

    def test_under_dvc_it_says_what_dvc_removed(self, work: Workspace) -> None:
        shutil.rmtree(workspace.TRAINED, ignore_errors=True)
        work.set("train.global_batch", 1 << 20)
        output = work.run("convoy", "stage", "train", expect=1, DVC_STAGE="train")
        assert "error: params.yaml: train.global_batch" in output
        assert "note: artifacts/train is not there now: `dvc repro` removes" in output
        assert "`dvc checkout artifacts/train`" in output
        assert "note:" not in work.run("convoy", "stage", "train", expect=1)

    def test_two_at_once(self, work: Workspace) -> None:
        before = contents()
        with workspace.lock_workspace(work.path, "flow run brave-otter"):
            output = work.run("convoy", "stage", "shard", expect=1)
        assert "is in use by flow run brave-otter, process" in output
        assert "Traceback" not in output
        assert contents() == before

    def test_an_exception_of_the_users_code_is_shown_here_alone(self, work: Workspace) -> None:
        edit(MODULE, "yield Record(", f"raise ValueError('{SECRET}')\n            yield Record(")
        output = work.run("convoy", "stage", "shard", expect=1)
        details, error = output.split("error: ")
        assert error.startswith(
            "toy_workload.records(), after 0 records, raised ValueError at toy_"
        )
        assert SECRET not in error
        assert SECRET in details


class TestWorkload:
    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ("import csv", "import csv\nx = = 1", ["importing", "toy_workload.py:4: SyntaxError"]),
            ("import csv", "import nope", ["it needs 'nope'", "install it or remove the import"]),
            ("import csv", "from csv import nope", ["ImportError at toy_workload.py:3", "'nope'"]),
            ("import csv", "1 / 0", ["ZeroDivisionError at toy_workload.py:3"]),
            ("def loss", "def lost", ["lacks loss()", "a workload has records(), model()"]),
            ("def records", "def record", ["lacks records()"]),
            ("example = [", "example = 5 or [", ["`example` must be a list of rows"]),
            ("hidden: int = 16", "*, size: int = 16", ["train.model: ", "'hidden'", "size: int"]),
        ],
    )
    @pytest.mark.parametrize("stage", ["ingest", "train"])
    def test_that_does_not_fit(
        self, work: Workspace, stage: str, old: str, new: str, words: list[str]
    ) -> None:
        edit(MODULE, old, new)
        refuse(stage, "params.yaml: ", *words)

    def test_that_is_missing(self, work: Workspace) -> None:
        MODULE.unlink()
        refuse("shard", "params.yaml: workload.code: there is no toy_workload.py")
        MODULE.mkdir()
        work.set("workload.code", "toy_workload.py")
        refuse("shard", "workload.code: toy_workload.py is not all of the code of toy_workload")

    @pytest.mark.parametrize(
        ("module", "code", "words"),
        [
            ("toy", "toy_workload.py", "name toy.py, or the folder toy"),
            ("toy.workload", "toy_workload.py", "name toy, or the folder toy"),
            ("toy_workload", "datasets", "not all of the code of toy_workload"),
        ],
    )
    def test_whose_code_is_elsewhere(
        self, work: Workspace, module: str, code: str, words: str
    ) -> None:
        work.set("workload", {"module": module, "code": code})
        refuse("train", "params.yaml: workload.code: ", words)

    def test_with_the_name_of_a_module_that_is_loaded(self, work: Workspace) -> None:
        MODULE.rename("data.py")
        work.set("workload", {"module": "data", "code": "data.py"})
        refuse("shard", "another module has that name", "rename yours")

    def test_of_another_workspace_in_the_same_process(
        self, work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        STAGES["shard"](Config.load())
        other = tmp_path / "other"
        shutil.copytree(work.path, other)
        monkeypatch.chdir(other)
        refuse("shard", "another module has that name", "use a process for each workspace")

    def test_parameters_that_ingest_does_not_take(self, work: Workspace) -> None:
        work.set("ingest.params", {"cuont": 3})
        refuse("ingest", "params.yaml: ingest.params: ", "'cuont'", "ingest(destination: pathlib.")

    def test_a_type_error_inside_ingest_is_its_own(self, work: Workspace) -> None:
        edit(MODULE, "    with (dest", f"    raise TypeError('{SECRET}')\n    with (dest")
        shown = refuse("ingest", "toy_workload.ingest() raised TypeError at toy_workload.py:")
        assert SECRET not in shown


class TestIngest:
    @pytest.fixture
    def copying(self, work: Workspace) -> Workspace:
        edit(MODULE, "def ingest(", "def not_ingest(")
        Path("raw").mkdir()
        Path("raw/sums.csv").write_text("1,0.5,0.6,EU\n")
        work.set("ingest", {"source": "raw"})
        return work

    def test_a_source_is_copied(self, copying: Workspace) -> None:
        STAGES["ingest"](Config.load())
        assert Path("datasets/toy/sums.csv").read_text() == "1,0.5,0.6,EU\n"

    @pytest.mark.parametrize(
        ("ingest", "words"),
        [
            ({}, "ingest.source: toy_workload has no ingest(), so name the file or folder"),
            ({"source": "nowhere"}, "ingest.source: there is no nowhere"),
            ({"source": "datasets/toy"}, "lie in each other"),
            ({"source": "datasets"}, "lie in each other"),
            ({"source": "."}, "lie in each other"),
            ({"source": "raw", "params": {"count": 1}}, "ingest.params: toy_workload has no"),
        ],
    )
    def test_a_source_that_cannot_be_taken(
        self, copying: Workspace, ingest: dict[str, Any], words: str
    ) -> None:
        copying.set("ingest", ingest)
        refuse("ingest", "params.yaml: ", words)

    def test_a_file_in_it_that_cannot_be_copied(self, copying: Workspace) -> None:
        Path("raw/dangling").symlink_to("nowhere")
        refuse("ingest", "ingest.source: raw/dangling could not be copied (No such file")

    def test_a_source_beside_an_ingest_function(self, work: Workspace) -> None:
        work.set("ingest", {"source": "toy_workload.py", "params": {}})
        refuse("ingest", "ingest.source: toy_workload has its own ingest(): remove one")

    def test_no_byte(self, copying: Workspace) -> None:
        Path("raw/sums.csv").write_text("")
        refuse("ingest", "brought no byte into datasets/toy: the dataset is empty")

    @AS_ROOT
    def test_a_full_disk(self, work: Workspace, small_disk: Any) -> None:
        before = {p.name: p.read_bytes() for p in Path("datasets/toy").iterdir()}
        shutil.move("datasets", "kept")
        small_disk(work.path / "datasets", 100_000)
        shutil.copytree("kept", "datasets", dirs_exist_ok=True)
        work.set("ingest.params.count", 90_000)
        refuse("ingest", "datasets/toy could not be written (No space left on device)", "Make room")
        assert {p.name: p.read_bytes() for p in Path("datasets/toy").iterdir()} == before
        edit(MODULE, "def ingest(", "def not_ingest(")
        Path("raw").mkdir()
        Path("raw/large").write_bytes(bytes(200_000))
        work.set("ingest", {"source": "raw"})
        refuse("ingest", "raw/large could not be copied (No space left on device)")


class TestShard:
    def test_no_record(self, work: Workspace) -> None:
        Path("datasets/toy/sums.csv").write_text("")
        refuse("shard", "found no record in datasets/toy: the dataset is empty")

    def test_no_raw_input(self, work: Workspace) -> None:
        shutil.rmtree("datasets/toy")
        refuse("shard", "datasets/toy is missing: run `convoy stage ingest`")

    def test_all_unknown_jurisdictions_are_listed_with_their_counts(self, work: Workspace) -> None:
        edit(
            MODULE,
            "jurisdiction)",
            "'MARS' if int(number) < 7 else 'VENUS' if b == '0.0' else 'EU')",
        )
        refuse(
            "shard",
            "no rule in params.yaml: residency.rules names these jurisdictions: "
            "MARS (7 records), VENUS (9 records). Nothing was written. Add rules",
        )

    def test_the_values_of_a_wrong_field_are_not_listed_without_end(self, work: Workspace) -> None:
        edit(MODULE, "jurisdiction)", "f'J{number}')")
        shown = refuse("shard", "J0 (1 records)", "and 650 more. Nothing was written")
        assert len(shown) < 10_000

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("''", "record 450 of the workload's records() has no jurisdiction"),
            ("None", "record 450 of the workload's records() has no jurisdiction"),
            ("7", "record 450 of the workload's records() has no jurisdiction"),
            ("['EU']", "record 450 of the workload's records() has no jurisdiction"),
            (f"'{SECRET}: x'", "record 450 of the workload's records(): a jurisdiction is letters"),
        ],
    )
    def test_a_record_without_a_jurisdiction_is_named_by_its_place(
        self, work: Workspace, value: str, words: str
    ) -> None:
        # Records before it that no rule names count as well.
        whose = f"{value} if number == '450' else 'MARS' if number == '3' else 'EU')"
        edit(MODULE, "jurisdiction)", whose)
        assert SECRET not in refuse("shard", words)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ("[1, 2]", "record 0 of the workload's records(): its fields are not values by name"),
            ("{}", "record 0 of the workload's records(): its fields are not values by name"),
            ("{1: 2}", "record 0 of the workload's records(): its fields are not values by name"),
            ("{'a': object()}", "record 0 of the workload's records(): a field holds a object"),
            ("{'a': int(number) or 'x'}", "field 'a' in shard "),
            ("(lambda d: d.update(a=d) or d)({})", "a field holds itself"),
        ],
    )
    def test_fields_that_no_shard_can_hold(self, work: Workspace, fields: str, words: str) -> None:
        edit(MODULE, '{"number": int(number), "a": float(a), "b": float(b)}', fields)
        refuse("shard", words)

    def test_what_is_no_record(self, work: Workspace) -> None:
        edit(MODULE, "yield Record(", f"yield '{SECRET}' or Record(")
        assert SECRET not in refuse("shard", "record 0 of the workload's records() is a str")

    def test_an_exception_of_records_keeps_its_text_here(self, work: Workspace) -> None:
        whose = f"jurisdiction if number < '5' else {{}}['{SECRET}'])"
        edit(MODULE, "jurisdiction)", whose)
        shown = refuse(
            "shard", "toy_workload.records(), after ", "raised KeyError at toy_workload.py:26"
        )
        assert SECRET not in shown
        kept = Path(".convoy/logs/user-error.txt")
        assert SECRET in kept.read_text()
        assert kept.stat().st_mode & 0o777 == 0o600

    def test_a_record_error_is_passed_on(self, work: Workspace) -> None:
        edit(MODULE, "import Record", "import Record, RecordError")
        edit(
            MODULE,
            "yield Record(",
            "raise RecordError('sums.csv:1: field b is empty')\n            yield Record(",
        )
        refuse("shard", "toy_workload.records(): sums.csv:1: field b is empty")

    @AS_ROOT
    def test_a_full_disk(self, work: Workspace, small_disk: Any) -> None:
        shutil.move("artifacts", "kept")
        small_disk(work.path / "artifacts", 120_000)
        shutil.copytree("kept", "artifacts", dirs_exist_ok=True)
        work.set("shard.compression", "none")
        refuse(
            "shard", "artifacts/shard could not be written (No space left on device)", "Make room"
        )


class TestUpload:
    def test_a_jurisdiction_that_may_be_nowhere(self, work: Workspace) -> None:
        work.set("upload.regions", ["eu", "us"])
        refuse("upload", "no region may hold the shards of CN (no rule lets shard of CN be in eu)")

    def test_an_expired_rule(self, work: Workspace) -> None:
        params = work.params
        params["residency"]["rules"][2]["expires"] = "2020-01-31"
        work.write_params(params)
        refuse("upload", "no region may hold the shards of CN", "no rule lets shard of CN be in eu")
        params["residency"]["rules"][0]["expires"] = "2020-01-31"
        work.write_params(params)
        refuse("upload", "EU (rule 'eu-rule' expired on 2020-01-31)", "Add a region or a rule")

    def test_a_file_where_the_store_should_be(self, work: Workspace) -> None:
        shutil.rmtree(".convoy/stores/us")
        Path(".convoy/stores/us").write_text("in the way")
        refuse("upload", "regions.us.store (file:.convoy/stores/us)", "remove the file that stands")

    @AS_ROOT
    def test_a_store_that_is_read_only(self, work: Workspace, small_disk: Any) -> None:
        shutil.rmtree(".convoy/stores/cn")
        small_disk(work.path / ".convoy/stores/cn", 100_000, "ro")
        refuse("upload", "regions.cn.store", "Read-only file system", "mount it writable")

    @AS_ROOT
    def test_a_store_that_fills(self, work: Workspace, small_disk: Any) -> None:
        shutil.rmtree(".convoy/stores/cn")
        small_disk(work.path / ".convoy/stores/cn", 20_000)
        with pytest.raises(ConvoyError, match=r"regions\.cn\.store .*free space on that disk"):
            STAGES["upload"](Config.load())
        assert len(list(Path("artifacts/upload").iterdir())) == 3  # the receipts of before

    def test_a_loose_key_file(self, work: Workspace) -> None:
        Path(".convoy/keys/us.key").chmod(0o640)
        refuse("upload", "regions.us.wrapping_key", "has mode 0640", "run chmod 600")

    @pytest.mark.parametrize("stage", ["upload", "train"])
    def test_a_key_file_that_is_gone_is_not_replaced(self, work: Workspace, stage: str) -> None:
        Path(".convoy/keys/eu.key").unlink()
        refuse(stage, "regions.eu.wrapping_key", "is missing: restore .convoy/keys/eu.key from")

    @pytest.mark.parametrize("stage", ["upload", "train"])
    def test_another_key(self, work: Workspace, stage: str) -> None:
        Path(".convoy/keys/eu.key").write_bytes(bytes(32))
        refuse(stage, "regions.eu.wrapping_key", "does not unwrap this data key")

    def test_fewer_records_than_a_batch(self, work: Workspace) -> None:
        work.set("train.global_batch", 5000)
        words = "train.global_batch is 5000 and region eu may read 555 training records after excl"
        refuse("upload", words, "lower it, ingest more")
        refuse("train", words)

    def test_no_held_out_record(self, work: Workspace) -> None:
        work.set("shard.holdout", 0.0)
        STAGES["shard"](Config.load())
        refuse("upload", "shard.holdout is 0.0 and region eu may read no held-out record")

    def test_restricted_records_under_fail(self, work: Workspace) -> None:
        work.set("residency.on_restricted", "fail")
        refuse("upload", "shard of CN may not be in region eu", "renew a rule in params.yaml")

    @pytest.mark.parametrize("how", ["changed", "cut", "swapped", "gone"])
    def test_a_local_shard(self, work: Workspace, how: str) -> None:
        shutil.rmtree(".convoy/stores/eu")
        first, second = sorted(Path("artifacts/shard/shards").glob("train-EU-*"))[:2]
        damage(first, second, how)
        before = contents()
        with pytest.raises(ConvoyError) as refused:
            STAGES["upload"](Config.load())
        assert first.name in str(refused.value)
        assert "run `convoy stage shard`" in str(refused.value)
        after = {name: content for name, content in contents().items() if "stores/eu" not in name}
        assert after == before  # the receipts too; what was sent before it is sealed and whole

    def test_a_manifest_of_another_dataset(self, work: Workspace) -> None:
        work.set("dataset", "other")
        for stage in ("upload", "train", "evaluate", "register"):
            refuse(stage, "manifest.json is of dataset toy, and params.yaml: dataset is other")


def damage(first: Path, second: Path, how: str) -> None:
    content = first.read_bytes()
    if how == "changed":
        middle = len(content) // 2
        first.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "cut":
        first.write_bytes(content[:-1])
    elif how == "swapped":
        first.write_bytes(second.read_bytes())
    else:
        first.unlink()


class TestTrain:
    def test_a_manifest_of_another_version(self, work: Workspace) -> None:
        work.set("shard.holdout", 0.2)
        STAGES["shard"](Config.load())
        refuse("train", "artifacts/upload/eu.json is of version", "run `convoy stage upload`")

    def test_a_receipt_that_is_missing_or_edited(self, work: Workspace) -> None:
        receipt = Path("artifacts/upload/eu.json")
        receipt.write_text("{}")
        refuse("train", "artifacts/upload/eu.json: Field required; run `convoy stage upload`")
        receipt.unlink()
        refuse("train", "artifacts/upload/eu.json is missing: run `convoy stage upload`")

    def test_a_receipt_for_shards_that_are_gone(self, work: Workspace) -> None:
        gone, cut, *_ = work.read_json("artifacts/upload/eu.json")["placed"]
        (Path(".convoy/stores/eu") / gone["address"]).unlink()
        (Path(".convoy/stores/eu") / cut["address"]).write_bytes(b"short")
        words = ("region eu", "lost 1 and holds 1 of another size", gone["shard"], cut["shard"])
        refuse("train", *words, "Run `convoy stage upload`")
        assert not Path(".convoy/runs").exists()

    def test_a_manifest_that_is_missing_or_edited(self, work: Workspace) -> None:
        manifest = Path("artifacts/shard/manifest.json")
        edit(manifest, ",64,64,", ",64,63,")
        refuse("train", "artifacts/upload/eu.json is of version")
        manifest.unlink()
        refuse("train", "manifest.json is missing: run `convoy stage shard`")

    def test_mlflow_that_does_not_answer(self, work: Workspace) -> None:
        work.set("register.tracking_uri", "http://127.0.0.1:9")
        words = "MLflow at http://127.0.0.1:9 does not answer", "register.tracking_uri"
        refuse("train", *words)
        with pytest.raises(ConvoyError, match="does not answer"):
            check_before_run(Config.load(), work.path)

    def test_uncommitted_code_where_that_is_refused(self, work: Workspace) -> None:
        work.set("register.require_clean_git", True)
        refuse("train", "register.require_clean_git is true and params.yaml is not committed")


class TestRepository:
    def check(self, work: Workspace, words: str) -> None:
        before = contents()
        with pytest.raises(VersioningError, match=words):
            check_before_run(Config.load(), work.path)
        assert contents() == before

    def test_none(self, work: Workspace) -> None:
        shutil.rmtree(".git")
        self.check(work, r"is not in a git repository that can be read.* run `git init`")
        assert read_revision(work.path).git == "none"

    def test_no_git(self, work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        self.check(work, "git is not installed")

    def test_no_dvc(self, work: Workspace) -> None:
        shutil.rmtree(".dvc")
        self.check(work, "has no .dvc folder: run `dvc init`")

    def test_no_dvc_yaml(self, work: Workspace) -> None:
        Path("dvc.yaml").unlink()
        self.check(work, "dvc.yaml is missing: `convoy init` writes one")

    def test_dirty(self, work: Workspace) -> None:
        clean = read_revision(work.path).git
        assert len(clean) == 40
        check_before_run(Config.load(), work.path)
        Path("notes.txt").write_text("git need not know it")
        Path("artifacts/train").mkdir()
        Path("dvc.lock").write_text("schema: '2.0'\n")
        assert read_revision(work.path).git == clean
        MODULE.write_text(MODULE.read_text() + "# changed\n")
        assert read_revision(work.path).git == f"{clean}-dirty"
        check_before_run(Config.load(), work.path)
        work.set("register.require_clean_git", True)
        self.check(work, r"params.yaml, toy_workload.py are not committed: commit, or set it to")

    def test_code_that_git_does_not_know_is_dirty(self, work: Workspace) -> None:
        clean = read_revision(work.path).git
        Path("sibling.py").write_text("")
        assert read_revision(work.path).git == f"{clean}-dirty"

    def test_a_workspace_below_the_repository(
        self, work: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inner = work.path / "deep" / "ör"
        inner.mkdir(parents=True)
        for name in ("params.yaml", "dvc.yaml", "toy_workload.py"):
            shutil.copy(name, inner)
        for command in (["git", "add", "-A"], ["git", "commit", "-qm", "Inner"]):
            subprocess.run(command, check=True, env={**os.environ, **work.environment})
        clean = read_revision(inner).git
        assert not clean.endswith("-dirty")
        for name in ("dvc.lock", "artifacts/report.json"):
            (inner / name).parent.mkdir(exist_ok=True)
            (inner / name).write_text("x")
        assert read_revision(inner).git == clean
        (inner / "params.yaml").write_text("x")
        assert read_revision(inner).git == f"{clean}-dirty"
