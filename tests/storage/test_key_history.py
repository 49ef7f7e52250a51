"""A log that was handed over to other keys: whole by any of them, and not by a stolen one."""

import shutil
from pathlib import Path

import pytest

from storage.errors import StorageError, StoreUnavailable
from storage.key_handover import Handover, sign_handover
from storage.log_checkpoint import Checkpoint
from storage.log_file import LogFile
from storage.notary import read_signing_key
from storage.signed_note import SigningKey
from tests.tamper_log import Audited


@pytest.fixture
def handed(tmp_path: Path) -> tuple[Audited, list[SigningKey]]:
    """A log with its three keys, and checkpoints of each."""
    audited = Audited(tmp_path / "log")
    audited.write(5)
    keys = [read_signing_key(audited.config.signing_key)]
    for _ in range(2):
        audited.rotate()
        keys.append(read_signing_key(audited.config.signing_key))
        audited.write(4)
    return audited, keys


def test_it_is_whole_by_each_of_its_keys(handed: tuple[Audited, list[SigningKey]]) -> None:
    audited, keys = handed
    assert len({key.verifier for key in keys}) == 3
    assert len({key.name for key in keys}) == 1
    for key in keys:
        found = audited.verify(key.verifier)
        assert found.findings == ()
        assert found.num_proven == found.num_entries == 19
    lines = audited.log.read_bytes().replace(b'"num_bytes":3', b'"num_bytes":4', 1)
    audited.log.write_bytes(lines)
    assert {audited.verify(key.verifier).is_whole for key in keys} == {False}


def test_a_key_that_was_handed_over_signs_no_more(
    handed: tuple[Audited, list[SigningKey]],
) -> None:
    audited, keys = handed
    end = LogFile(audited.log).end().frontier
    for key in keys[:2]:
        folder = audited.folder / "witness" / key.name
        checkpoint = Checkpoint(key.name, end.size + 1, end.root)
        forged = folder / "checkpoints" / f"{checkpoint.size:020d}"
        forged.write_bytes(key.sign(checkpoint.text))
        for trusted in keys:
            found = audited.verify(trusted.verifier)
            assert any("signs from" in f.what for f in found.findings), found.findings
        forged.unlink()
        assert audited.verify(key.verifier).is_whole


def test_a_hand_over_by_a_stolen_key_is_found(handed: tuple[Audited, list[SigningKey]]) -> None:
    audited, keys = handed
    thief = SigningKey(keys[0].name, bytes(32))
    unsigned = Handover(99, keys[2].verifier, thief.verifier).text
    into = Handover(0, thief.verifier, keys[0].verifier).text
    notes = {
        "without the last key's signature": thief.sign(unsigned),
        "without the first key's signature": thief.sign(into),
        "a second one of the first key": sign_handover(7, keys[0], thief),
        "of another size": sign_handover(2, keys[2], thief).replace(b"\n2\n", b"\n99\n"),
        "between strangers": sign_handover(7, thief, SigningKey(thief.name, b"1" * 32)),
        "no note": b"?",
        "of another log": sign_handover(7, SigningKey("other", bytes(32)), thief),
    }
    place = audited.folder / "witness" / thief.name / "handovers" / f"{8:020d}"
    for what, note in notes.items():
        place.write_bytes(note)
        found = audited.verify(keys[0].verifier)
        assert any("hand-over" in f.what for f in found.findings), what
    place.unlink()
    assert audited.verify(keys[0].verifier).is_whole


def test_without_its_hand_over_a_new_key_proves_nothing(
    handed: tuple[Audited, list[SigningKey]],
) -> None:
    audited, keys = handed
    shutil.rmtree(audited.folder / "witness" / keys[0].name / "handovers")
    for key in keys:
        assert not audited.verify(key.verifier).is_whole


def test_a_rotation_that_was_cut_short_is_finished_before_anything_is_signed(
    tmp_path: Path,
) -> None:
    audited = Audited(tmp_path / "log")
    with pytest.raises(StorageError, match="is empty"):
        audited.rotate()
    audited.write(5)
    first = audited.key
    handovers = audited.folder / "witness" / first.name / "handovers"
    handovers.write_bytes(b"in the way")
    with pytest.raises(StoreUnavailable, match=r"audit\.witness"):
        audited.rotate()
    with pytest.raises(StorageError, match="run `convoy audit rotate`"):
        audited.write(1)
    handovers.unlink()
    key = audited.rotate()
    audited.write(1)
    assert key != first
    assert audited.verify(first).findings == ()
    assert audited.verify(key).num_proven == 13
