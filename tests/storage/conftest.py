"""The real servers, started once a session, and regions that live on them."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.region import Region
from tests.servers import MotoServer, OpenBao, SeaweedFS, moto_server, openbao, seaweedfs

MakeRegion = Callable[[str], Region]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        server.make_bucket("convoy-eu")
        yield server


@pytest.fixture(scope="session")
def bao_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    with openbao(tmp_path_factory.mktemp("openbao")) as server:
        yield server


@pytest.fixture(scope="session")
def aws_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def region(tmp_path: Path) -> Region:
    """A region that needs nothing but a directory."""
    return file_region(tmp_path)


@pytest.fixture
def s3_region(s3_server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Region:
    """A region in a folder of its own of a real S3 bucket."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = s3_server.store_url("convoy-eu", uuid.uuid4().hex)
    return file_region(tmp_path).model_copy(update={"store": store})


@pytest.fixture(params=["file", "memory", "s3"])
def store_region(request: pytest.FixtureRequest, tmp_path: Path) -> Region:
    """The same region on each kind of store, empty."""
    if request.param == "s3":
        on_s3: Region = request.getfixturevalue("s3_region")
        return on_s3
    region = file_region(tmp_path)
    if request.param == "memory":
        return region.model_copy(update={"store": f"memory:{uuid.uuid4().hex}"})
    return region


@pytest.fixture(params=["file", "kms", "vault"])
def make_key_region(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeRegion:
    """Make a region with a fresh wrapping key of each kind."""
    if request.param == "file":
        return lambda name: file_region(tmp_path, name)
    server: MotoServer | OpenBao
    if request.param == "kms":
        server = request.getfixturevalue("aws_server")
    else:
        server = request.getfixturevalue("bao_server")
    for variable, value in server.environment.items():
        monkeypatch.setenv(variable, value)

    def make(name: str) -> Region:
        place = "eu-west-1" if isinstance(server, MotoServer) else name
        url = server.wrapping_key_url(place)
        return file_region(tmp_path, name).model_copy(update={"wrapping_key": url})

    return make


def file_region(directory: Path, name: str = "eu") -> Region:
    return Region(
        name=name,
        jurisdiction=name.upper(),
        store=f"file:{directory}/stores/{name}",
        wrapping_key=f"file:{directory}/keys/{name}.key",
    )
