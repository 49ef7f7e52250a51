"""Regions: the URLs that are taken, and those that are refused before anything is opened."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from storage.locations import (
    AzureLocation,
    FileLocation,
    GoogleLocation,
    S3Location,
    parse_store,
    parse_wrapping_key,
)
from storage.region import Region

_ARN = "arn:aws:kms:eu-west-1:111122223333:key"


def _region(**changes: str) -> Region:
    fields = {
        "name": "eu",
        "jurisdiction": "EU",
        "store": "file:.convoy/stores/eu",
        "wrapping_key": "file:.convoy/keys/eu.key",
    }
    return Region.model_validate(fields | changes)


@pytest.mark.parametrize(
    ("url", "path"),
    [("file:a/b", "a/b"), ("file:/a/b", "/a/b"), ("file:///a/b", "/a/b")],
)
def test_file_urls(url: str, path: str) -> None:
    assert parse_store(url) == parse_wrapping_key(url) == FileLocation(Path(path))


def test_s3_urls() -> None:
    assert parse_store("s3://b/p/q?region=eu-west-1") == S3Location(
        "b", "p/q", "https://s3.eu-west-1.amazonaws.com", "eu-west-1"
    )
    assert parse_store("s3://b?region=cn-north-1") == S3Location(
        "b", "", "https://s3.cn-north-1.amazonaws.com.cn", "cn-north-1"
    )
    assert parse_store("s3://b?endpoint=http://127.0.0.1:9") == S3Location(
        "b", "", "http://127.0.0.1:9", "us-east-1"
    )


def test_google_and_azure_urls() -> None:
    assert parse_store("gs://b/p/q") == GoogleLocation("b", "p/q", "https://storage.googleapis.com")
    assert parse_store("gs://b?endpoint=http://127.0.0.1:9") == GoogleLocation(
        "b", "", "http://127.0.0.1:9"
    )
    assert parse_store("az://convoyeu/shards/p") == AzureLocation(
        "convoyeu", "shards", "p", "https://convoyeu.blob.core.windows.net"
    )
    assert parse_store("az://convoycn/s?endpoint=https://convoycn.blob.core.chinacloudapi.cn") == (
        AzureLocation("convoycn", "s", "", "https://convoycn.blob.core.chinacloudapi.cn")
    )


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        ("/just/a/path", "must begin with its scheme"),
        ("ftp://bucket", "unknown store scheme 'ftp'"),
        ("gs://", "gs:// needs a bucket"),
        ("gs://bucket?region=europe-west3", "unknown URL parameter 'region'"),
        ("gs://bucket?endpoint=ftp://host", "plain http:// or https://"),
        ("az://account", "needs an account and a container"),
        ("az://no.such/container", "needs an account and a container"),
        ("file:", "needs a path"),
        ("file://host/path", "name no host"),
        ("s3://bucket", "needs .region=REGION"),
        ("s3://?region=eu-west-1", "needs a bucket"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://bucket?regoin=eu-west-1", "unknown URL parameter 'regoin'"),
        ("s3://bucket?endpoint=ftp://host", "plain http:// or https://"),
    ],
)
def test_store_urls_that_are_refused(store: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        _region(store=store)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("vault://host/key", "needs host, mount and key"),
        ("vault://host/mount/key?tls=no", "tls must be true or false"),
        ("vault://10.0.0.1:8200/mount/key?tls=false", "without TLS"),
        ("aws-kms://alias/eu", "full ARN"),
        (f"aws-kms://{_ARN}/mrk-1234", "multi-Region key"),
        (f"aws-kms://{_ARN}/1234?endpoint=http://kms.example", "without TLS"),
        ("gcp-kms://x", "unknown wrapping-key scheme 'gcp-kms'"),
    ],
)
def test_wrapping_keys_that_are_refused(key: str, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        _region(wrapping_key=key)


@pytest.mark.parametrize(
    "changes",
    [
        {"store": "s3://AKID:hunter2@bucket?region=eu-west-1"},
        {"store": "gs://user:hunter2@bucket"},
        {"store": "az://user:hunter2@container"},
        {"store": "s3://bucket?endpoint=https://user:hunter2@host"},
        {"store": "s3://bucket?region=eu-west-1&secret=hunter2"},
        {"wrapping_key": "vault://token:hunter2@host/mount/key"},
        {"wrapping_key": f"aws-kms://{_ARN}/1?endpoint=https://user:hunter2@host"},
    ],
)
def test_a_credential_in_a_url_is_refused_and_not_repeated(changes: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        _region(**changes)
    assert "hunter2" not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    "changes", [{"name": "EU west"}, {"name": ""}, {"jurisdiction": ""}, {"colour": "blue"}]
)
def test_names_and_unknown_fields_are_checked(changes: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        _region(**changes)
