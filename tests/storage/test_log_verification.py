"""`verify_log`: every change is found and named, also by those who can sign and rewrite."""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.access_log import AccessLog
from storage.errors import StorageError, StoreUnavailable
from storage.log_checkpoint import AuditConfig
from storage.log_file import LogFile
from storage.log_proof import prove_entry, prove_extension
from storage.log_verification import Finding, verify_log
from storage.merkle import is_consistent
from storage.notary import Notary, read_signing_key
from storage.region import Region
from storage.signed_note import SigningKey, open_note
from storage.witness import Witness
from tests.tamper_log import Audited, count_refusals, entry, make_log

_VERIFIER = Path(__file__).parents[2] / "docs" / "verify_entry.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    return make_log(tmp_path_factory.mktemp("made"))


@pytest.fixture
def audited(made: Audited, tmp_path: Path) -> Audited:
    shutil.copytree(made.folder, tmp_path / "log")
    return Audited(tmp_path / "log")


def test_a_whole_log_is_whole(audited: Audited) -> None:
    found = audited.verify(audited.key)
    assert found.findings == ()
    assert found.silent_writers == ()
    assert (found.num_entries, found.num_proven, found.num_checkpoints) == (34, 30, 3)
    assert found.key == str(audited.key)


Lines = list[bytes]


def _change(lines: Lines) -> None:
    lines[13] = lines[13].replace(b'"eu"', b'"us"')


def _insert(lines: Lines) -> None:
    lines.insert(13, lines[13].replace(b'"eu"', b'"us"'))


def _remove(lines: Lines) -> None:
    del lines[13]


def _swap(lines: Lines) -> None:
    lines[13], lines[14] = lines[14], lines[13]


def _truncate(lines: Lines) -> None:
    del lines[13:]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_change, "it was changed"),
        (_insert, "it was inserted"),
        (_remove, "it was removed or moved"),
        (_swap, "it was removed or moved"),
        (_truncate, "it and all after it are missing, 7 entries"),
    ],
)
def test_the_first_bad_entry_is_named(
    audited: Audited, change: Callable[[Lines], None], what: str
) -> None:
    lines = audited.log.read_bytes().splitlines(keepends=True)
    change(lines)
    audited.log.write_bytes(b"".join(lines))
    found = audited.verify(audited.key)
    assert found.findings[0].entry == 13
    what += ": the checkpoint of 20 entries proves it"
    assert Finding(entry=13, what=what) in found.findings
    assert found.num_proven == 0


@pytest.mark.parametrize("change", [_change, _insert, _remove, _swap, _truncate])
def test_a_log_rewritten_with_a_valid_tree_is_found(
    audited: Audited, change: Callable[[Lines], None]
) -> None:
    """Somebody who can write the log's folder, and signs again with the stolen key."""
    key = audited.key
    lines = audited.log.read_bytes().splitlines(keepends=True)
    change(lines)
    _rewrite(audited, lines)
    found = audited.verify(key)
    assert not found.is_whole
    assert any(f.entry in (11, 13) for f in found.findings), found.findings


def _rewrite(audited: Audited, lines: Lines) -> None:
    shutil.rmtree(audited.log.parent)
    LogFile(audited.log).append([line.removesuffix(b"\n") for line in lines])
    Notary(audited.log, audited.config).publish()


def test_a_log_that_goes_back_in_time_is_found(audited: Audited, tmp_path: Path) -> None:
    """The whole folder of an earlier day, in order in itself: only the second place knows."""
    early = Audited(tmp_path / "early")
    early.write(5)
    shutil.copytree(early.log.parent, tmp_path / "yesterday")
    early.write(5)
    shutil.rmtree(early.log.parent)
    shutil.copytree(tmp_path / "yesterday", early.log.parent)
    what = "entries 7 to 13 are missing: the checkpoint of 14 entries proves it"
    assert Finding(entry=7, what=what) in early.verify(early.key).findings


def test_another_key_is_found(audited: Audited) -> None:
    key = audited.key
    shutil.rmtree(audited.folder / "witness")
    shutil.rmtree(audited.log.parent)
    (audited.folder / "audit.key").unlink()
    audited.write(3)
    found = audited.verify(key)
    assert not found.is_whole
    assert f"bears no signature of {key.name}" in found.findings[0].what


def test_a_missing_second_place_is_found(audited: Audited) -> None:
    key = audited.key
    shutil.rmtree(audited.folder / "witness")
    [finding] = audited.verify(key).findings
    assert finding.what == "the checkpoint of 30 entries is not in the second place"


def test_a_checkpoint_under_another_name_is_found(audited: Audited) -> None:
    folder = audited.folder / "witness" / audited.key.name / "checkpoints"
    first, *_, last = sorted(folder.iterdir())
    last.write_bytes(first.read_bytes())
    found = audited.verify(audited.key).findings
    assert any("it is that of 11 entries" in finding.what for finding in found)


def test_where_the_hashes_are_gone_the_entry_lies_between_two_checkpoints(
    audited: Audited,
) -> None:
    lines = audited.log.read_bytes().splitlines(keepends=True)
    _change(lines)
    audited.log.write_bytes(b"".join(lines))
    audited.log.with_suffix(".hashes").unlink()
    found = audited.verify(audited.key)
    what = "one or more of the entries 11 to 19 are not those of the checkpoint of 20 entries"
    assert Finding(entry=11, what=what) in found.findings


def test_hashes_that_were_changed_are_no_fault_of_the_entry(audited: Audited) -> None:
    path = audited.log.with_suffix(".hashes")
    path.write_bytes(bytes(32) + path.read_bytes()[32:])
    [finding] = audited.verify(audited.key).findings
    assert finding.entry == 0
    assert finding.what == "log.hashes was changed; a checkpoint proves the entry itself"


def test_random_damage_is_refused(tmp_path: Path) -> None:
    assert count_refusals(tmp_path, num_cases=400, seed=7) == 400


def test_a_checkpoint_costs_no_reading_of_the_entries(audited: Audited) -> None:
    notary = Notary(audited.log, audited.config)
    audited.log.chmod(0o200)
    audited.log.with_suffix(".hashes").chmod(0o200)
    size = audited.log.stat().st_size
    # Sparse: whoever read it would find other bytes.
    before = audited.log.read_bytes()
    with audited.log.open("r+b") as file:
        file.write(bytes(size))
    checkpoint = notary.publish()
    audited.log.write_bytes(before)
    assert checkpoint is not None
    assert checkpoint.size == 34
    assert audited.verify(audited.key).num_proven == 34


def test_publishing_twice_adds_nothing(audited: Audited) -> None:
    notary = Notary(audited.log, audited.config)
    assert notary.publish() == notary.publish()
    assert len(Witness(audited.config.witness).checkpoints(audited.key)) == 4


def test_logs_may_share_a_second_place(audited: Audited, tmp_path: Path) -> None:
    key = audited.key
    other = Audited(tmp_path / "other")
    other.write(3, publish=False)
    shared = AuditConfig(signing_key=other.config.signing_key, witness=audited.config.witness)
    Notary(other.log, shared).publish()
    witness = Witness(shared.witness)
    [theirs] = [found for found in witness.logs() if found != key]
    assert verify_log(other.log, witness.checkpoints(theirs), theirs).num_proven == 5
    assert audited.verify(key).is_whole
    # One of them in the place of the other is found by its key.
    assert not verify_log(other.log, witness.checkpoints(key), key).is_whole


def test_a_checkpoint_there_is_never_replaced(audited: Audited) -> None:
    audited.write(1, publish=False)
    end = audited.log.read_bytes().count(b"\n")
    folder = audited.folder / "witness" / audited.key.name / "checkpoints"
    (folder / f"{end:020d}").write_bytes(b"another")
    with pytest.raises(StorageError, match=r"holds another convoy/.* was changed"):
        Notary(audited.log, audited.config).publish()


def test_the_second_place_may_be_a_bucket(s3_region: Region, tmp_path: Path) -> None:
    audited = Audited(tmp_path / "log")
    config = AuditConfig(signing_key=tmp_path / "audit.key", witness=s3_region.store)
    for _ in range(2):
        audited.write(3, publish=False)
        Notary(audited.log, config).publish()
    Notary(audited.log, config).publish()
    witness = Witness(config.witness)
    [key] = witness.logs()
    found = verify_log(audited.log, witness.checkpoints(key), key)
    assert (found.is_whole, found.num_proven, found.num_checkpoints) == (True, 10, 2)


def test_a_long_stage_makes_checkpoints_within(tmp_path: Path) -> None:
    audited = Audited(tmp_path)
    config = audited.config.model_copy(update={"checkpoint_entries": 600})
    log = AccessLog(audited.log, config)
    for number in range(2000):
        log.append(entry(number))
    tries = 200
    while not any(tmp_path.glob("witness/*/*/checkpoints")) and tries:
        tries -= 1
        log.append(entry(tries))
        log.flush()
        time.sleep(0.05)
    assert any(tmp_path.glob("witness/*/*/checkpoints"))
    log.close()
    found = audited.verify(audited.key)
    assert found.is_whole
    assert found.num_proven >= 600


def test_a_log_cut_since_its_checkpoint_is_signed_no_more(audited: Audited) -> None:
    notary = Notary(audited.log, audited.config)
    notary.publish()
    for suffix in (".jsonl", ".hashes", ".tree"):
        audited.log.with_suffix(suffix).unlink()
    with pytest.raises(StorageError, match="its newest checkpoint says 34 entries"):
        notary.publish()
    AccessLog(audited.log).append(entry(0))
    AccessLog(audited.log).close()
    with pytest.raises(StorageError, match="its newest checkpoint says 34 entries"):
        notary.publish()


def test_a_key_that_is_missing_or_open_is_named(audited: Audited) -> None:
    path = audited.folder / "audit.key"
    assert path.stat().st_mode & 0o777 == 0o600
    notary = Notary(audited.log, audited.config)
    path.chmod(0o644)
    with pytest.raises(StorageError, match=r"audit.signing_key .* has mode 0644"):
        notary.publish()
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(StorageError, match=r"audit.signing_key .* is missing: restore it"):
        notary.publish()
    path.write_bytes(b"PRIVATE+KEY+what")
    path.chmod(0o600)
    with pytest.raises(StorageError, match="holds no signing key") as raised:
        notary.publish()
    assert "what" not in str(raised.value)
    assert SigningKey.parse(content.decode().strip()).verifier == audited.key


def test_a_second_place_that_does_not_work_is_named(audited: Audited, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    config = AuditConfig(
        signing_key=audited.config.signing_key, witness=f"file:{tmp_path}/file/there"
    )
    with pytest.raises(StoreUnavailable, match=r"^audit.witness \(file:"):
        Notary(audited.log, config).publish()
    with pytest.raises(ValueError, match="unknown store scheme"):
        AuditConfig(witness="ftp://x")


def _verify_by_itself(proof: Path, key: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(_VERIFIER), str(proof), key]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]}
    )


def test_an_entry_is_proven_to_those_who_have_no_convoy(audited: Audited, tmp_path: Path) -> None:
    outside = Witness(audited.config.witness).checkpoints(audited.key)
    path = tmp_path / "proof.json"
    line = audited.log.read_text().splitlines()[22]
    proof = prove_entry(audited.log, 22, outside, audited.key)
    path.write_text(proof.model_dump_json())
    done = _verify_by_itself(path, str(audited.key))
    assert (done.returncode, done.stdout) == (0, line + "\n"), done.stderr
    other = SigningKey(audited.key.name, bytes(32)).verifier
    assert _verify_by_itself(path, str(other)).returncode == 1
    for change in (
        {"index": 21},
        {"entry": line.replace("eu", "us")},
        {"path": proof.path[:-1]},
        {"path": proof.path[::-1]},
        {"checkpoint": proof.checkpoint.replace("30", "31")},
    ):
        path.write_text(json.dumps(proof.model_dump() | change))
        done = _verify_by_itself(path, str(audited.key))
        assert done.returncode == 1, change
        assert done.stdout == ""


def test_the_verifier_agrees_on_every_entry(audited: Audited) -> None:
    code = compile(_VERIFIER.read_text(), str(_VERIFIER), "exec")
    outside = Witness(audited.config.witness).checkpoints(audited.key)
    path = audited.folder / "proof.json"
    argv = sys.argv
    try:
        sys.argv = ["verify_entry.py", str(path), str(audited.key)]
        for index in range(30):
            path.write_text(prove_entry(audited.log, index, outside, audited.key).model_dump_json())
            exec(code, {"__name__": "__main__"})
    finally:
        sys.argv = argv


def test_what_cannot_be_proven_is_said(audited: Audited) -> None:
    outside = Witness(audited.config.witness).checkpoints(audited.key)
    with pytest.raises(StorageError, match=r"there is no entry 34: the log .* has 34, from 0"):
        prove_entry(audited.log, 34, outside, audited.key)
    with pytest.raises(StorageError, match="entry 31 is newer than the newest checkpoint"):
        prove_entry(audited.log, 31, outside, audited.key)
    with pytest.raises(StorageError, match="holds no checkpoint yet"):
        prove_entry(audited.log, 1, [], audited.key)
    lines = audited.log.read_bytes().splitlines(keepends=True)
    _change(lines)
    audited.log.write_bytes(b"".join(lines))
    with pytest.raises(StorageError, match="is not what its newest checkpoint says"):
        prove_entry(audited.log, 1, outside, audited.key)


def test_one_checkpoint_is_proven_to_extend_another(audited: Audited) -> None:
    key = audited.key
    outside = Witness(audited.config.witness).checkpoints(audited.key)
    proof = prove_extension(audited.log, 11, outside, key)
    path = [base64.b64decode(item) for item in proof.path]
    old, new = (
        base64.b64decode(open_note(note.encode(), key).split("\n")[2])
        for note in (proof.old_checkpoint, proof.checkpoint)
    )
    assert is_consistent(11, old, 30, new, path)
    with pytest.raises(StorageError, match=r"no checkpoint is of 12 entries; .* 11, 20, 30"):
        prove_extension(audited.log, 12, outside, key)


def test_the_key_file_opens_what_it_signed(audited: Audited) -> None:
    assert read_signing_key(audited.config.signing_key).verifier == audited.key
