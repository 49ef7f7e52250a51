"""Google Cloud and Azure stores as far as they go without those clouds.

A small service records what is asked: where it goes, and with whose credentials. It stores nothing.
"""

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from storage.errors import StoreRefused, StoreUnavailable
from storage.region import Region
from storage.store import check_store, open_store


class _Service(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.requests: list[tuple[str, str, str]] = []
        self.status = 403


class _Answer(http.server.BaseHTTPRequestHandler):
    server: _Service

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        signed = self.headers.get("Authorization", "")
        self.server.requests.append((self.command, unquote(self.path), signed))
        self.send_response(self.server.status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[_Service]:
    with _Service() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield service
        service.shutdown()
        thread.join()


@pytest.fixture
def google(
    region: Region, service: _Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Region:
    account = {
        "gcs_base_url": "http://127.0.0.1:1",
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    endpoint = f"http://127.0.0.1:{service.server_address[1]}"
    return region.model_copy(update={"store": f"gs://convoy-eu/data?endpoint={endpoint}"})


@pytest.fixture
def azure(region: Region, service: _Service, monkeypatch: pytest.MonkeyPatch) -> Region:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"secret" * 8).decode())
    # A variable that points elsewhere must not move the bytes.
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "http://127.0.0.1:1")
    endpoint = f"http://127.0.0.1:{service.server_address[1]}"
    return region.model_copy(update={"store": f"az://convoyeu/shards/data?endpoint={endpoint}"})


def test_a_google_bucket_that_refuses_is_named_and_not_asked_again(
    google: Region, service: _Service
) -> None:
    with pytest.raises(StoreRefused, match=r"regions\.eu\.store \(gs://.*GOOGLE_APPLICATION_CRED"):
        check_store(google)
    assert [path for _, path, _ in service.requests] == ["/convoy-eu/data/convoy-probe"]


def test_an_azure_container_that_refuses_is_named_and_not_asked_again(
    azure: Region, service: _Service
) -> None:
    with pytest.raises(StoreRefused, match=r"regions\.eu\.store \(az://.*AZURE_STORAGE_ACCOUNT"):
        check_store(azure)
    [(_, path, signed)] = service.requests
    assert path == "/shards/data/convoy-probe"
    assert signed.startswith("SharedKey convoyeu:")


def test_what_is_put_goes_to_the_endpoint_of_the_url(
    google: Region, azure: Region, service: _Service
) -> None:
    service.status = 201
    open_store(google).put("o", b"x")
    open_store(azure).put("o", b"x")
    assert [path for _, path, _ in service.requests] == ["/convoy-eu/data/o", "/shards/data/o"]


def test_unusable_credentials_are_named_before_anything_is_sent(
    google: Region, service: _Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "account.json").write_text("{}")
    with pytest.raises(StoreUnavailable, match="GOOGLE_APPLICATION_CREDENTIALS"):
        check_store(google)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(StoreUnavailable, match="GOOGLE_APPLICATION_CREDENTIALS"):
        check_store(google)
    assert service.requests == []
