"""Shards to stores and back: sent once, refused or replaced when broken, and all of it noted."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data.errors import DataError, ManifestError, ShardBroken
from data.manifest import Manifest
from data.record import Record
from data.residency import Residency
from data.sealed_shards import SealedShards, open_region
from data.shard import Shard, Verify
from data.sharding import ShardConfig, write_shards
from data.upload import UploadReceipt, read_receipt, upload_region
from storage.access_log import AccessEntry, AccessLog
from storage.buffers import Buffers
from storage.region import Region
from storage.sealed import PART_BYTES
from tests.residency import EU_AT_HOME
from tests.storage.conftest import file_region

SECRET = "content-of-a-record"


@dataclass
class Setting:
    """Shards on disk, one region that may hold those of EU, and its log."""

    path: Path
    manifest: Manifest
    region: Region
    residency: Residency

    def upload(self) -> tuple[UploadReceipt, dict[str, bool]]:
        """The receipt, and for each shard whether it was sent."""
        sent: dict[str, bool] = {}

        def note(shard: Shard, was_sent: bool) -> None:
            assert shard.name not in sent
            sent[shard.name] = was_sent

        receipt = upload_region(
            self.manifest, self.path / "shards", self.region, self.residency, self.log, note
        )
        return receipt, sent

    @property
    def store(self) -> Path:
        return self.path / "stores" / "eu"

    @property
    def log(self) -> AccessLog:
        return AccessLog(self.path / "access.log")

    def entries(self, action: str) -> list[AccessEntry]:
        return [entry for entry in self.log.entries() if entry.action == action]

    def object(self, receipt: UploadReceipt, number: int) -> Path:
        return self.store / receipt.placed[number].address


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    records = [
        Record({"text": f"{SECRET} {i}", "i": i}, "EU" if i % 3 else "CN") for i in range(90)
    ]
    (tmp_path / "shards").mkdir()
    shards = write_shards(records, tmp_path / "shards", ShardConfig(records_per_shard=16))
    region = file_region(tmp_path)
    manifest = Manifest(dataset="toy", shards=shards)
    return Setting(tmp_path, manifest, region, EU_AT_HOME)


def test_what_may_be_there_is_placed_and_comes_back(setting: Setting) -> None:
    receipt, sent = setting.upload()
    assert set(sent.values()) == {True}
    assert {placed.shard for placed in receipt.placed} == {
        shard.name for shard in setting.manifest.shards if shard.jurisdiction == "EU"
    }
    sealed = open_region(setting.manifest, setting.region, setting.log)
    for shard in setting.manifest.shards:
        if shard.jurisdiction == "EU":
            rows = list(sealed.open(shard))
            assert len(rows) == shard.num_records
            assert all(row["text"].startswith(SECRET) for row in rows)
    for path in setting.store.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_a_second_upload_puts_nothing(setting: Setting) -> None:
    first, sent = setting.upload()
    puts = len(setting.entries("put"))
    assert puts == len(sent)
    before = {path: path.read_bytes() for path in setting.store.rglob("objects/*")}
    second, sent_again = setting.upload()
    assert second == first
    assert sent_again == dict.fromkeys(sent, False)
    assert len(setting.entries("put")) == puts
    assert {p: p.read_bytes() for p in setting.store.rglob("objects/*")} == before


def test_progress_counts_every_byte_before_the_last_shard(setting: Setting) -> None:
    heard: list[int | str] = []
    upload_region(
        setting.manifest,
        setting.path / "shards",
        setting.region,
        setting.residency,
        setting.log,
        lambda shard, sent: heard.append(shard.name),
        heard.append,
    )
    sizes = {s.name: s.num_bytes for s in setting.manifest.shards if s.jurisdiction == "EU"}
    assert sum(each for each in heard if isinstance(each, int)) == sum(sizes.values())
    assert {each for each in heard if isinstance(each, str)} == sizes.keys()
    assert isinstance(heard[-1], str)


def test_without_local_shards_what_is_stored_is_enough(setting: Setting) -> None:
    first, _ = setting.upload()
    shutil.rmtree(setting.path / "shards")
    assert setting.upload()[0] == first
    setting.object(first, 0).unlink()
    with pytest.raises(DataError, match=f"shard {first.placed[0].shard} is neither in "):
        setting.upload()


@pytest.mark.parametrize("how", ["changed", "cut", "longer", "swapped", "gone"])
@pytest.mark.parametrize("verify", ["seal", "digest"])
def test_a_broken_object_is_refused_then_replaced(
    setting: Setting, how: str, verify: Verify
) -> None:
    receipt, _ = setting.upload()
    shards = {shard.name: shard for shard in setting.manifest.shards}
    path, other = setting.object(receipt, 0), setting.object(receipt, 1)
    whole = path.read_bytes()
    if how == "changed":
        path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    elif how == "cut":
        path.write_bytes(whole[:-1])
    elif how == "longer":
        path.write_bytes(whole + b"x")
    elif how == "swapped":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
    name = receipt.placed[0].shard
    sealed = open_region(setting.manifest, setting.region, setting.log, verify=verify)
    with pytest.raises(ShardBroken, match=f"shard {name} .*region eu") as refused:
        sealed.open(shards[name])
    assert SECRET not in str(refused.value)
    _, sent = setting.upload()
    assert [shard for shard, was_sent in sent.items() if was_sent] == [name]
    assert sealed.open(shards[name]).num_records == shards[name].num_records


def test_what_a_holder_of_the_key_forged_is_refused_by_the_digest_alone(setting: Setting) -> None:
    """Other content of the same size, sealed as the shard that it is not."""
    setting.upload()
    shard = next(s for s in setting.manifest.shards if s.jurisdiction == "EU")
    content = (setting.path / "shards" / shard.name).read_bytes()
    forged = content.replace(SECRET.encode(), SECRET.upper().encode())
    assert forged != content
    sealed = open_region(setting.manifest, setting.region, setting.log, verify="seal")
    parts = iter([forged])
    sealed.put(shard, lambda into: into.__setitem__(slice(None), next(parts)), Buffers(PART_BYTES))
    assert next(iter(sealed.open(shard)))["text"].startswith(SECRET.upper())
    wary = open_region(setting.manifest, setting.region, setting.log)
    with pytest.raises(ShardBroken, match="its digest is"):
        wary.open(shard)


@pytest.mark.parametrize("how", ["changed", "longer", "gone"])
def test_a_file_that_changes_on_the_way_leaves_no_object(
    setting: Setting, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at the files, before they are read."""
    name = next(shard.name for shard in setting.manifest.shards if shard.jurisdiction == "EU")
    path = setting.path / "shards" / name
    content = path.read_bytes()
    opened = SealedShards.put

    def put(*arguments: Any) -> None:
        if arguments[1].name == name:
            if how == "changed":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            elif how == "longer":
                path.write_bytes(content + b"x")
        opened(*arguments)

    monkeypatch.setattr(SealedShards, "put", put)
    if how == "gone":
        path.unlink()
    with pytest.raises(DataError, match=re.escape(name)):
        setting.upload()
    address = open_region(setting.manifest, setting.region, setting.log).address(
        next(shard for shard in setting.manifest.shards if shard.name == name)
    )
    assert not (setting.store / address).exists()


def test_what_may_not_be_there_is_noted_as_refused(setting: Setting) -> None:
    receipt, _ = setting.upload()
    [withheld] = receipt.withheld
    assert (withheld.jurisdiction, withheld.num_records) == ("CN", 30)
    assert withheld.reason == "no rule names jurisdiction 'CN'"
    [refusal] = setting.entries("refuse")
    assert refusal.decision == "refused"
    assert refusal.object == f"{setting.manifest.digest}/CN"
    assert refusal.reason == withheld.reason


def test_a_region_that_may_hold_nothing_gets_no_key(setting: Setting) -> None:
    receipt = upload_region(
        setting.manifest, setting.path / "shards", setting.region, Residency(), setting.log
    )
    assert receipt.placed == ()
    assert {e.jurisdiction for e in receipt.withheld} == {"EU", "CN"}
    assert not setting.store.exists()
    assert not (setting.path / "keys" / "eu.key").exists()


def test_the_log_holds_no_content_and_no_plaintext_digest(setting: Setting) -> None:
    receipt, _ = setting.upload()
    sealed = open_region(setting.manifest, setting.region, setting.log)
    sealed.open(next(s for s in setting.manifest.shards if s.jurisdiction == "EU"))
    setting.log.flush()
    text = (setting.path / "access.log").read_text()
    assert SECRET not in text
    assert not [p.digest for p in receipt.placed if p.digest in text]
    [got] = setting.entries("get")
    assert got.object.startswith("objects/")
    assert got.num_bytes > 0


def test_a_receipt_of_another_version_or_form_is_refused(setting: Setting) -> None:
    receipt, _ = setting.upload()
    path = setting.path / "eu.json"
    with pytest.raises(ManifestError, match=r"eu.json is missing: run `convoy stage upload`"):
        read_receipt(path, setting.manifest)
    receipt.write(path)
    assert read_receipt(path, setting.manifest) == receipt
    other = Manifest(dataset="toy", shards=setting.manifest.shards[1:])
    with pytest.raises(ManifestError, match=r"eu.json is of version .*, the manifest is "):
        read_receipt(path, other)
    changes: list[tuple[str, Any]] = [("convoy-receipt-v1", "convoy-receipt-v9"), ("{", "[")]
    for old, new in changes:
        path.write_text(path.read_text().replace(old, new, 1))
        with pytest.raises(ManifestError, match=r"eu.json: .*run `convoy stage upload`"):
            read_receipt(path, setting.manifest)
