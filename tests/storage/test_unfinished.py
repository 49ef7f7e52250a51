"""Uploads in parts that a killed process left are ended; others are left alone."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import data.upload
from data.manifest import Manifest
from data.record import Record
from data.sharding import ShardConfig, write_shards
from storage.access_log import AccessLog
from storage.errors import StoreUnavailable
from storage.region import Region
from storage.unfinished import end_unfinished
from tests.residency import EU_AT_HOME
from tests.servers import SeaweedFS

NOW = timedelta(seconds=-60)
WRITER = """
import sys, time
from storage.errors import StoreUnavailable
from storage.region import Region
from storage.store import open_store

def parts():
    yield bytes(8 << 20)
    yield bytes(8 << 20)
    print("sent", flush=True)
    time.sleep(600)

open_store(Region.model_validate_json(sys.argv[1])).put("objects/a", parts())
"""


def begin_and_kill(region: Region) -> None:
    """Send parts of an object in another process, and kill it before the last one."""
    arguments = [sys.executable, "-c", WRITER, region.model_dump_json()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "sent\n"
        os.kill(writer.pid, signal.SIGKILL)


def list_keys(server: SeaweedFS, region: Region) -> list[str]:
    prefix = region.store.partition("?")[0].removeprefix("s3://convoy-eu/")
    found: dict[str, Any] = server.client().list_multipart_uploads(Bucket="convoy-eu")
    keys = [upload["Key"] for upload in found.get("Uploads", ())]
    return sorted(key.removeprefix(f"{prefix}/") for key in keys if key.startswith(prefix))


def test_what_a_killed_writer_left_is_ended_once_it_is_old(
    s3_region: Region, s3_server: SeaweedFS
) -> None:
    begin_and_kill(s3_region)
    assert list_keys(s3_server, s3_region) == ["objects/a"]
    assert end_unfinished(s3_region, {"objects/a"}) == 0
    assert end_unfinished(s3_region, {"objects/b", "objects/c"}, NOW) == 0
    assert list_keys(s3_server, s3_region) == ["objects/a"]
    assert end_unfinished(s3_region, {"objects/a", "objects/b"}, NOW) == 1
    assert list_keys(s3_server, s3_region) == []


def test_the_next_upload_ends_those_of_its_shards(
    s3_region: Region, s3_server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data.upload, "end_unfinished", partial(end_unfinished, older_than=NOW))
    (tmp_path / "shards").mkdir()
    records = [Record({"number": number}, "EU") for number in range(4)]
    config = ShardConfig(records_per_shard=2, holdout=0.0)
    manifest = Manifest(dataset="d", shards=write_shards(records, tmp_path / "shards", config))
    log = AccessLog(tmp_path / "access.log")
    upload = partial(
        data.upload.upload_region, manifest, tmp_path / "shards", s3_region, EU_AT_HOME, log
    )
    first, second = (placed.address for placed in upload().placed)
    prefix = s3_region.store.partition("?")[0].removeprefix("s3://convoy-eu/")
    client = s3_server.client()
    client.delete_object(Bucket="convoy-eu", Key=f"{prefix}/{first}")
    for name in (first, second, "objects/other"):
        client.create_multipart_upload(Bucket="convoy-eu", Key=f"{prefix}/{name}")
    upload()
    assert list_keys(s3_server, s3_region) == sorted((second, "objects/other"))


def test_other_stores_keep_nothing_unfinished(region: Region) -> None:
    assert end_unfinished(region, {"objects/a"}, NOW) == 0


def test_a_service_that_does_not_answer_is_named(s3_region: Region) -> None:
    store = s3_region.store.replace("127.0.0.1", "127.0.0.2")
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable, match="cannot end uploads"):
        end_unfinished(s3_region.model_copy(update={"store": store}), {"objects/a"}, NOW)
    assert time.monotonic() - begun < 60
