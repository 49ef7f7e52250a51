"""The whole flow on a real S3 server with TLS and real key services: only URLs change."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers import MotoServer, OpenBao, SeaweedFS, moto_server, openbao, seaweedfs
from tests.workspaces import Workspace, make_workspace

BUCKETS = {"eu": "convoy-eu", "us": "convoy-us", "cn": "convoy-cn"}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with seaweedfs(tmp_path_factory.mktemp("s3"), tls=True) as server:
        for bucket in BUCKETS.values():
            server.make_bucket(bucket)
        yield server


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    with openbao(tmp_path_factory.mktemp("vault")) as server:
        yield server


@pytest.fixture(scope="module")
def kms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    with moto_server(tmp_path_factory.mktemp("kms")) as server:
        yield server


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
    s3: SeaweedFS,
    vault: OpenBao,
    kms: MotoServer,
    prefect_server: dict[str, str],
) -> Workspace:
    keys = {
        "eu": vault.wrapping_key_url("eu"),
        "us": kms.wrapping_key_url("us-east-1"),
        "cn": vault.wrapping_key_url("cn"),
    }
    regions = {
        name: {
            "jurisdiction": name.upper(),
            "store": s3.store_url(bucket, "team/data"),
            "wrapping_key": keys[name],
        }
        for name, bucket in BUCKETS.items()
    }
    environment = {**kms.environment, **vault.environment, **s3.environment, **prefect_server}
    workspace = make_workspace(
        tmp_path_factory.mktemp("remote") / "w", environment, regions=regions
    )
    workspace.run("convoy", "run")
    return workspace


def objects(s3: SeaweedFS, bucket: str) -> dict[str, bytes]:
    client: Any = s3.client()
    listed = client.list_objects_v2(Bucket=bucket, Prefix="team/data/objects/")
    return {
        item["Key"]: client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
        for item in listed.get("Contents", [])
    }


def test_each_bucket_holds_what_may_be_there_sealed(trained: Workspace, s3: SeaweedFS) -> None:
    for region, bucket in BUCKETS.items():
        stored = objects(s3, bucket)
        placed = trained.read_json(f"artifacts/upload/{region}.json")["placed"]
        assert placed
        assert stored.keys() == {f"team/data/{shard['address']}" for shard in placed}
        for content in stored.values():
            assert b"ARROW1" not in content
            assert b"number" not in content


def test_dvc_is_content(trained: Workspace) -> None:
    assert "up to date" in trained.run("dvc", "status")


def test_the_local_shards_are_not_needed(trained: Workspace) -> None:
    """As in a fresh clone, which has the manifest and neither shards nor a training."""
    shutil.rmtree(trained.path / "artifacts/train")
    for path in (trained.path / "artifacts/shard/shards").iterdir():
        path.unlink()
    receipt = trained.read("artifacts/upload/eu.json")
    num_puts = trained.read(".convoy/access/log.jsonl").count(b'"action":"put"')
    assert "eu holds 12 sealed shards" in trained.run("convoy", "stage", "upload")
    assert trained.read("artifacts/upload/eu.json") == receipt
    assert trained.read(".convoy/access/log.jsonl").count(b'"action":"put"') == num_puts > 0
    trained.run("convoy", "stage", "train")


def test_every_access_is_logged_and_no_secret_is_written(
    trained: Workspace, s3: SeaweedFS, vault: OpenBao
) -> None:
    log = trained.read(".convoy/access/log.jsonl").decode()
    for action in ("put", "get", "unwrap", "generate", "refuse", "register"):
        assert f'"action":"{action}"' in log
    audited = json.loads(trained.run("convoy", "audit", "verify", "--json"))
    assert audited["num_proven"] == audited["num_entries"] == log.count("\n")
    assert audited["silent_writers"] == []
    secrets = [
        s3.environment["AWS_SECRET_ACCESS_KEY"],
        next(v for k, v in vault.environment.items() if k.endswith("TOKEN")),
    ]
    for path in trained.path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [s for s in secrets if s.encode() in content], path


def test_a_store_that_refuses_is_named_before_anything_is_spent(trained: Workspace) -> None:
    output = trained.run("convoy", "run", expect=1, AWS_SECRET_ACCESS_KEY="wrong" * 8)
    assert "error: " in output
    assert "regions.eu.store" in output


def test_a_key_service_that_is_away_is_named_before_anything_is_spent(trained: Workspace) -> None:
    params = trained.params
    url = params["regions"]["eu"]["wrapping_key"]
    try:
        trained.set("regions.eu.wrapping_key", "vault://127.0.0.1:9/transit/eu/convoy?tls=false")
        output = trained.run("convoy", "run", expect=1)
    finally:
        trained.set("regions.eu.wrapping_key", url)
    assert "regions.eu.wrapping_key" in output
