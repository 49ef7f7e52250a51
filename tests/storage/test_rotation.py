"""Keys are wrapped anew without a shard touched, and destroyed for good."""

import hashlib
import json
import os
import signal
import stat
import sys
from pathlib import Path

import pytest

from storage.access_log import AccessLog
from storage.envelope import (
    associated_data,
    envelope_name,
    list_envelopes,
    list_shredded,
    obtain_data_key,
    rewrap_envelope,
    unwrap_data_key,
)
from storage.errors import (
    KeyringError,
    KeyShredded,
    ObjectChanged,
    SealBroken,
    StoreUnavailable,
)
from storage.keyring import FileKeyring, open_keyring
from storage.region import Region
from storage.rotation import find_envelopes, rotate, shred
from storage.sealed import open_sealed, seal
from storage.store import open_store
from tests.servers import MotoServer, OpenBao, SeaweedFS
from tests.storage.conftest import MakeRegion, file_region

AAD = associated_data("places", "v1", "eu", "EU", "objects/x")


@pytest.fixture
def log(tmp_path: Path) -> AccessLog:
    return AccessLog(tmp_path / "access.log")


def place(region: Region, *versions: str) -> dict[str, bytes]:
    """A data key for each version, and an object sealed under the first."""
    store, keyring = open_store(region), open_keyring(region)
    keys = {v: obtain_data_key(region, store, keyring, "places", v) for v in versions}
    store.put("objects/x", seal(keys[versions[0]], b"the records", AAD))
    return keys


def read(region: Region, version: str) -> bytes:
    return unwrap_data_key(region, open_store(region), open_keyring(region), "places", version)


def turn_key(region: Region, request: pytest.FixtureRequest) -> Region:
    """What the key's owner does at the service before envelopes are rewrapped."""
    if region.wrapping_key.startswith("aws-kms:"):
        aws: MotoServer = request.getfixturevalue("aws_server")
        return region.model_copy(update={"wrapping_key": aws.wrapping_key_url("eu-west-1")})
    if region.wrapping_key.startswith("vault:"):
        bao: OpenBao = request.getfixturevalue("bao_server")
        transit = bao.client().secrets.transit
        transit.rotate_key("convoy", mount_point="transit/eu")
        transit.update_key_configuration(
            "convoy", min_decryption_version=1, mount_point="transit/eu"
        )
    return region


def test_shards_stay_and_open_by_the_new_key(
    make_key_region: MakeRegion, log: AccessLog, request: pytest.FixtureRequest
) -> None:
    region = make_key_region("eu")
    keys = place(region, "v1", "v2")
    store = open_store(region)
    sealed = store.get("objects/x")
    before = {e.version: e.content for e in list_envelopes(region, store)}
    region = turn_key(region, request)
    if region.wrapping_key.startswith("aws-kms:"):
        with pytest.raises(KeyringError, match=r"regions\.eu\.wrapping_key .* refuses to decrypt"):
            read(region, "v1")
    done = rotate([region], log)
    assert [(e.region, e.dataset, e.version) for e in done] == [
        ("eu", "places", "v1"),
        ("eu", "places", "v2"),
    ]
    assert store.get("objects/x") == sealed
    assert open_sealed(read(region, "v1"), sealed, AAD) == b"the records"
    for version, key in keys.items():
        assert read(region, version) == key
        assert store.get(envelope_name(version)) != before[version]
        assert key not in store.get(envelope_name(version))
    assert [(e.action, e.object) for e in log.entries()] == [
        ("rotate", "keys/v1.json"),
        ("rotate", "keys/v2.json"),
    ]
    if region.wrapping_key.startswith("vault:"):
        assert b'"wrapped_key":"dmF1bHQ6dj' in store.get("keys/v1.json")
        transit = request.getfixturevalue("bao_server").client().secrets.transit
        latest = transit.read_key("convoy", mount_point="transit/eu")["data"]["latest_version"]
        transit.update_key_configuration(
            "convoy", min_decryption_version=latest, mount_point="transit/eu"
        )
        assert read(region, "v1") == keys["v1"]
        transit.update_key_configuration(
            "convoy", min_decryption_version=1, mount_point="transit/eu"
        )


class TestFileKey:
    def test_the_old_key_is_gone_and_the_new_one_private(
        self, region: Region, log: AccessLog, tmp_path: Path
    ) -> None:
        place(region, "v1")
        old = (tmp_path / "keys/eu.key").read_bytes()
        rotate([region], log)
        assert [p.name for p in (tmp_path / "keys").iterdir()] == ["eu.key"]
        new = tmp_path / "keys/eu.key"
        assert new.read_bytes() != old
        assert stat.S_IMODE(new.stat().st_mode) == 0o600
        new.write_bytes(old)
        with pytest.raises(KeyringError, match="does not unwrap"):
            read(region, "v1")

    def test_regions_that_share_a_key_go_together(self, tmp_path: Path, log: AccessLog) -> None:
        eu = file_region(tmp_path)
        us = file_region(tmp_path, "us").model_copy(update={"wrapping_key": eu.wrapping_key})
        keys = {region.name: place(region, "v1")["v1"] for region in (eu, us)}
        rotate([eu, us], log)
        assert {region.name: read(region, "v1") for region in (eu, us)} == keys

    def test_killed_at_any_moment_all_opens_and_it_goes_on(self, tmp_path: Path) -> None:
        """By SIGKILL before its n-th change of a file, for every n."""
        num_killed = 0
        for moment in range(100):
            region = file_region(tmp_path / str(moment))
            log = AccessLog(tmp_path / str(moment) / "log")
            keys = place(region, "v1", "v2")
            killed = rotate_and_die(region, log, moment)
            num_killed += killed
            assert {v: read(region, v) for v in keys} == keys
            rotate([region], log)
            assert {v: read(region, v) for v in keys} == keys
            left = {p.name for p in (tmp_path / str(moment) / "keys").iterdir()}
            assert {name for name in left if "~" not in name} == {"eu.key"}
            if not killed:
                break
        assert num_killed >= 5


def rotate_and_die(region: Region, log: AccessLog, moment: int) -> bool:
    """Rotate in a child; whether it came to its `moment`-th change of a file and was killed."""
    child = os.fork()
    if child == 0:
        changes = 0

        def watch(event: str, arguments: object) -> None:
            nonlocal changes
            if event in ("os.rename", "os.link", "os.remove"):
                changes += 1
                if changes > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            rotate([region], log)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_changed_envelope_is_not_wrapped_anew(
    region: Region, log: AccessLog, tmp_path: Path
) -> None:
    place(region, "v1")
    path = tmp_path / "stores/eu/keys/v1.json"
    envelope = json.loads(path.read_bytes())
    mac = envelope["mac"]
    envelope["mac"] = hashlib.sha256(mac.encode()).hexdigest()
    changed = path.read_bytes().replace(mac.encode(), envelope["mac"].encode())
    path.write_bytes(changed)
    with pytest.raises(SealBroken, match="does not authenticate"):
        rotate([region], log)
    assert path.read_bytes() == changed
    assert (tmp_path / "keys/eu.key.retiring").exists()


def test_what_was_shredded_meanwhile_does_not_come_back(store_region: Region) -> None:
    place(store_region, "v1")
    store, keyring = open_store(store_region), open_keyring(store_region)
    [envelope] = list_envelopes(store_region, store)
    assert isinstance(keyring, FileKeyring)
    keyring.renew()
    rewrap_envelope(store_region, store, keyring, envelope)
    with pytest.raises(ObjectChanged, match="run the command again"):
        rewrap_envelope(store_region, store, keyring, envelope)
    [envelope] = list_envelopes(store_region, store)
    store.delete(envelope_name("v1"))
    with pytest.raises(ObjectChanged):
        rewrap_envelope(store_region, store, keyring, envelope)
    assert not store.exists(envelope_name("v1"))
    store.delete(envelope_name("v1"))


def test_shredding_says_so_and_a_new_key_opens_nothing_of_before(
    store_region: Region, log: AccessLog
) -> None:
    keys = place(store_region, "v1", "v2")
    store = open_store(store_region)
    sealed = store.get("objects/x")
    shred(store_region, find_envelopes(store_region, "places", "v1"), log)
    with pytest.raises(KeyShredded, match=r"v1 of dataset 'places' was shredded in region eu by"):
        read(store_region, "v1")
    assert read(store_region, "v2") == keys["v2"]
    assert [note.version for note in list_shredded(store)] == ["v1"]
    again = obtain_data_key(store_region, store, open_keyring(store_region), "places", "v1")
    assert list_shredded(store) == ()
    with pytest.raises(SealBroken):
        open_sealed(again, sealed, AAD)
    [entry] = log.entries()
    assert (entry.action, entry.object, entry.decision) == ("shred", "keys/v1.json", "allowed")


def test_no_version_of_the_envelope_stays_in_a_bucket(
    s3_region: Region, s3_server: SeaweedFS, log: AccessLog
) -> None:
    client = s3_server.client()
    client.create_bucket(Bucket="versioned")
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    region = s3_region.model_copy(update={"store": s3_server.store_url("versioned", "team")})
    place(region, "v1")
    rotate([region], log)
    assert len(client.list_object_versions(Bucket="versioned", Prefix="team/keys/")["Versions"]) > 1
    shred(region, find_envelopes(region, "places"), log)
    left = client.list_object_versions(Bucket="versioned", Prefix="team/keys/")
    assert not left.get("Versions")
    assert not left.get("DeleteMarkers")


def test_an_envelope_under_a_lock_is_named_and_stays(
    s3_region: Region, s3_server: SeaweedFS, log: AccessLog
) -> None:
    client = s3_server.client()
    client.create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    region = s3_region.model_copy(update={"store": s3_server.store_url("locked")})
    keys = place(region, "v1")
    client.put_object_legal_hold(Bucket="locked", Key="keys/v1.json", LegalHold={"Status": "ON"})
    with pytest.raises(StoreUnavailable, match=r"keys/v1\.json under a legal hold.*can be read"):
        shred(region, find_envelopes(region, "places"), log)
    assert read(region, "v1") == keys["v1"]
    *_, entry = log.entries()
    assert (entry.action, entry.decision) == ("refuse", "refused")
