"""S3: what is refused, how it is said, and that nothing of a shell leads elsewhere."""

import http.server
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from storage.errors import StorageError, StoreUnavailable
from storage.region import Region
from storage.store import check_store, open_store
from tests.servers import MotoServer, SeaweedFS
from tests.storage.conftest import file_region


def test_objects_are_in_the_bucket_under_the_prefix(
    s3_region: Region, s3_server: SeaweedFS
) -> None:
    open_store(s3_region).put("shards/a", b"sealed")
    prefix = s3_region.store.partition("?")[0].removeprefix("s3://convoy-eu/")
    listed = s3_server.client().list_objects_v2(Bucket="convoy-eu", Prefix=prefix)
    assert [item["Key"] for item in listed["Contents"]] == [f"{prefix}/shards/a"]


def test_a_wrong_secret_is_named_and_not_repeated(
    s3_region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-still-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-that-is-secret")
    store = open_store(s3_region)
    text = _refusal(s3_region)
    assert "regions.eu.store (s3://convoy-eu/" in text
    assert "access denied: check AWS_ACCESS_KEY_ID" in text
    for secret in ("wrong-and-still-secret", "token-that-is-secret"):
        assert secret not in text + repr(store) + repr(s3_region)


def test_no_credentials_at_all_is_named(s3_region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    assert "finds no AWS credentials: check AWS_ACCESS_KEY_ID" in _refusal(s3_region)


def test_credentials_of_a_profile_are_used(
    s3_region: Region, s3_server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    key, secret = (
        s3_server.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    profile = f"[eu]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    (tmp_path / "credentials").write_text(profile)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "eu")
    check_store(s3_region)


def test_an_endpoint_that_is_down_is_named_soon(s3_region: Region) -> None:
    store = "s3://convoy-eu?endpoint=https://127.0.0.1:1"
    started = time.monotonic()
    text = _refusal(s3_region.model_copy(update={"store": store}))
    assert "nothing answers: start the service, or correct the endpoint" in text
    assert time.monotonic() - started < 20


def test_an_unknown_host_is_named(s3_region: Region) -> None:
    store = "s3://convoy-eu?endpoint=https://nowhere.invalid"
    text = _refusal(s3_region.model_copy(update={"store": store}))
    assert "its host name is not known: correct the endpoint" in text


def test_another_authority_is_not_trusted(
    s3_region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "other.pem"))
    text = _refusal(s3_region)
    assert "its certificate is not trusted: name its certificate authority in AWS_CA" in text


def test_ssl_cert_file_names_the_authority_too(
    s3_region: Region, s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.setenv("SSL_CERT_FILE", s3_server.environment["AWS_CA_BUNDLE"])
    check_store(s3_region)


def test_a_missing_or_broken_bundle_is_named(
    s3_region: Region, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
    assert "none.pem (No such file or directory): correct AWS_CA_BUNDLE" in _refusal(s3_region)
    (tmp_path / "none.pem").write_text("no certificate")
    assert "let AWS_CA_BUNDLE (or SSL_CERT_FILE) name a file" in _refusal(s3_region)


def test_a_missing_bucket_is_not_a_missing_object(
    aws_server: MotoServer, region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in aws_server.environment.items():
        monkeypatch.setenv(name, value)
    elsewhere = region.model_copy(
        update={"store": f"s3://no-such-bucket?endpoint={aws_server.endpoint}"}
    )
    text = _refusal(elsewhere)
    assert "the bucket does not exist: create it, or correct the URL" in text
    with pytest.raises(StoreUnavailable, match="the bucket does not exist"):
        open_store(elsewhere).get("o")


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_no_variable_leads_to_another_place(
    s3_region: Region, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "https://127.0.0.1:1")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    check_store(s3_region)


def test_a_busy_service_is_asked_again(busy_service: "_BusyService") -> None:
    busy_service.num_refusals = 2
    open_store(busy_service.region).put("o", b"x")
    assert busy_service.num_requests == 3


def test_a_service_that_stays_busy_is_given_up(busy_service: "_BusyService") -> None:
    busy_service.num_refusals = 1000
    with pytest.raises(StoreUnavailable, match=r"cannot write o \(503\)"):
        open_store(busy_service.region).put("o", b"x")
    assert busy_service.num_requests == 5


class _BusyService(http.server.ThreadingHTTPServer):
    """Answers 503 SlowDown to the first `num_refusals` requests."""

    num_refusals = 0
    num_requests = 0
    region: Region


class _Answer(http.server.BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        assert isinstance(self.server, _BusyService)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_requests += 1
        is_busy = self.server.num_requests <= self.server.num_refusals
        body = b"<Error><Code>SlowDown</Code></Error>" if is_busy else b""
        self.send_response(503 if is_busy else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def busy_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_BusyService]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with _BusyService(("127.0.0.1", 0), _Answer) as service:
        store = f"s3://convoy-eu?endpoint=http://127.0.0.1:{service.server_address[1]}"
        service.region = file_region(tmp_path).model_copy(update={"store": store})
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield service
        service.shutdown()
        thread.join()


def _refusal(region: Region) -> str:
    """Return all that a user could see of the refusal, chained causes and all."""
    with pytest.raises(StorageError) as caught:
        check_store(region)
    assert isinstance(caught.value, StoreUnavailable)
    return "".join(traceback.format_exception(caught.value, chain=True))
