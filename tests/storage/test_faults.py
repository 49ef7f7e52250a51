"""Servers that die, stall, refuse or reset while shards are sent and read: real ones, and a proxy.

Each ends in success after bounded retries, or in one clear error after which the upload goes on
where it was, sending nothing again that is whole in the store.
"""

import contextlib
import hashlib
import pickle
import random
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data.errors import DataError
from data.manifest import Manifest
from data.sealed_shards import SealedShards, open_region
from data.shard import Shard
from data.upload import UploadReceipt, check_placed, upload_region
from storage import clouds
from storage.access_log import AccessLog
from storage.errors import KeyringError, StoreRefused, StoreUnavailable
from storage.region import Region
from storage.sealed import open_sealed
from storage.store import open_store
from tests.residency import EU_AT_HOME
from tests.servers import OpenBao, SeaweedFS, seaweedfs
from tests.storage.conftest import file_region
from tests.storage.fault_proxy import (
    Fault,
    FaultProxy,
    Refusal,
    Request,
    Reset,
    Slow,
    Stall,
    fault_proxy,
)

_ROOT = Path(__file__).parents[2]
_SMALL, _LARGE = 300_000, 20_000_000
_SIZES = [_SMALL, _LARGE, *[_SMALL] * 8]
_ATTEMPTS = 5


class Service:
    """SeaweedFS that can be killed and started again, the same as before."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = contextlib.ExitStack()
        self.server: SeaweedFS
        self.start()

    def start(self) -> None:
        self.server = self._running.enter_context(seaweedfs(self._directory, tls=False))

    def kill(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("faults"))
    service.server.make_bucket("convoy-eu")
    yield service
    service.kill()


@pytest.fixture
def proxy(service: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    for name, value in service.server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    with fault_proxy(service.server.endpoint) as proxy:
        yield proxy


@dataclass
class Setting:
    """Shards on disk, and a region behind the proxy."""

    path: Path
    manifest: Manifest
    region: Region
    proxy: FaultProxy

    @property
    def log(self) -> AccessLog:
        return AccessLog(self.path / "access.log")

    def upload(self) -> UploadReceipt:
        return upload(self.path, self.manifest, self.region)

    def open(self) -> SealedShards:
        return open_region(self.manifest, self.region, self.log)

    def find_whole(self) -> set[str]:
        """Names of the shards that the store shows; each must open to what is on disk."""
        sealed = self.open()
        stored = {info.name for info in sealed.store.list("objects")}
        whole = {s.name for s in self.manifest.shards if sealed.address(s) in stored}
        assert len(whole) == len(stored)
        for shard in self.manifest.shards:
            if shard.name in whole:
                assert read(sealed, shard) == (self.path / "shards" / shard.name).read_bytes()
        return whole

    def check_goes_on(self) -> None:
        """The upload, called again, sends what is missing and nothing else, and all opens."""
        self.proxy.fault = lambda request: None
        whole = self.find_whole()
        self.proxy.take()
        self.upload()
        sealed = self.open()
        sent = {r.path.split("?")[0][-64:] for r in self.proxy.take() if r.puts_object}
        missing = [s for s in self.manifest.shards if s.name not in whole]
        assert sent == {sealed.address(s)[-64:] for s in missing}
        assert self.find_whole() == {s.name for s in self.manifest.shards}


def upload(path: Path, manifest: Manifest, region: Region) -> UploadReceipt:
    log = AccessLog(path / "access.log")
    return upload_region(manifest, path / "shards", region, EU_AT_HOME, log)


def make_shards(path: Path, sizes: list[int]) -> Manifest:
    """Files of random bytes, and their manifest: nothing here looks into a shard."""
    (path / "shards").mkdir()
    shards = []
    for number, size in enumerate(sizes):
        name = f"train-EU-{number:05}.arrow"
        content = random.Random(number).randbytes(size)
        (path / "shards" / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(name, digest, "train", "EU", 1, size))
    return Manifest(dataset="toy", shards=tuple(shards))


def read(sealed: SealedShards, shard: Shard) -> bytes:
    content = sealed.store.get(sealed.address(shard))
    return open_sealed(sealed.key, content, sealed._associated_data(shard))


@pytest.fixture
def setting(proxy: FaultProxy, tmp_path: Path) -> Setting:
    region = file_region(tmp_path)
    store = f"s3://convoy-eu/{uuid.uuid4().hex}?region=us-east-1&endpoint={proxy.endpoint}"
    region = region.model_copy(update={"store": store})
    return Setting(tmp_path, make_shards(tmp_path, _SIZES), region, proxy)


def first(num_times: int, fault: Fault, of: str) -> Callable[[Request], Fault | None]:
    """The fault for so many requests of a kind, and none for the others."""
    seen = iter(range(num_times))

    def decide(request: Request) -> Fault | None:
        if getattr(request, of) and next(seen, None) is not None:
            return fault
        return None

    return decide


def after(num_times: int, fault: Fault, of: str) -> Callable[[Request], Fault | None]:
    """The fault for all requests of a kind but the first so many."""
    seen = iter(range(num_times))

    def decide(request: Request) -> Fault | None:
        return fault if getattr(request, of) and next(seen, None) is None else None

    return decide


def test_nothing_is_sent_twice_without_faults(setting: Setting) -> None:
    setting.upload()
    puts = [r for r in setting.proxy.take() if r.puts_object]
    assert len(puts) == len(_SIZES) - 1 + 3  # one of them in three parts
    setting.upload()
    assert not [r for r in setting.proxy.take() if r.method in ("PUT", "POST")]


@pytest.mark.parametrize(
    "fault", [Refusal(503, "SlowDown"), Reset(), Refusal(500, "InternalError")]
)
def test_what_passes_is_asked_again(setting: Setting, fault: Fault) -> None:
    setting.proxy.fault = first(3, fault, "puts_object")
    setting.upload()
    puts = [r for r in setting.proxy.take() if r.puts_object]
    assert len(puts) == len(_SIZES) - 1 + 3 + 3
    setting.proxy.fault = first(3, fault, "gets_object")
    assert setting.find_whole() == {s.name for s in setting.manifest.shards}


def test_an_answer_that_breaks_off_is_read_on(setting: Setting) -> None:
    setting.upload()
    setting.proxy.take()
    setting.proxy.fault = first(3, Reset(in_answer=True), "gets_object")
    assert setting.find_whole() == {s.name for s in setting.manifest.shards}
    assert len([r for r in setting.proxy.take() if r.gets_object]) <= len(_SIZES) + 3


def test_a_connection_that_stalls_is_given_up_for_another(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clouds, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(clouds, "PUT_SECONDS", 3.0)
    setting.proxy.fault = first(2, Stall(), "puts_object")
    setting.upload()
    setting.proxy.fault = first(2, Stall(), "gets_object")
    assert setting.find_whole() == {s.name for s in setting.manifest.shards}


def test_a_slow_connection_is_not_a_stalled_one(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clouds, "STALL_SECONDS", 1.0)
    setting.upload()
    setting.proxy.take()
    small = setting.manifest.shards[0]
    sealed = setting.open()
    setting.proxy.fault = lambda request: Slow(100_000)
    assert len(read(sealed, small)) == _SMALL
    assert len([r for r in setting.proxy.take() if r.gets_object]) == 1


def test_a_service_that_stays_busy_is_given_up_and_taken_up_again(setting: Setting) -> None:
    setting.proxy.fault = after(6, Refusal(503, "SlowDown"), "puts_object")
    with pytest.raises(StoreUnavailable, match=r"regions\.eu\.store .* cannot write objects/"):
        setting.upload()
    num_refused = len([r for r in setting.proxy.take() if r.puts_object]) - 6
    assert _ATTEMPTS <= num_refused <= 7 * _ATTEMPTS  # those in flight, and parts of the large
    setting.check_goes_on()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Refusal(403, "RequestTimeTooSkewed"),
            "its clock and this one differ: set this machine's clock",
        ),
        (Refusal(400, "ExpiredToken"), "the credentials have expired: renew them"),
        (Refusal(403, "AccessDenied"), "access denied: check AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_cannot_succeed_is_not_tried_again(
    setting: Setting, fault: Refusal, message: str
) -> None:
    setting.proxy.fault = after(6, fault, "puts_object")
    with pytest.raises(StoreRefused, match=message):
        setting.upload()
    puts = [r.path for r in setting.proxy.take() if r.puts_object]
    assert len(set(puts)) == len(puts) <= 6 + 7
    setting.check_goes_on()


def test_an_upload_that_is_killed_goes_on_where_it_was(setting: Setting) -> None:
    script = (
        "import pickle, sys\nfrom tests.storage.test_faults import upload\n"
        "upload(*pickle.load(sys.stdin.buffer))\n"
    )
    for num_puts in (2, 7):
        reached = threading.Event()

        def hold(
            request: Request, num_puts: int = num_puts, reached: threading.Event = reached
        ) -> Fault | None:
            if not request.puts_object:
                return None
            with setting.proxy.lock:
                count = sum(r.puts_object for r in setting.proxy.requests)
            if count <= num_puts:
                return None
            reached.set()
            return Stall()

        setting.proxy.take()
        setting.proxy.fault = hold
        process = subprocess.Popen([sys.executable, "-c", script], cwd=_ROOT, stdin=subprocess.PIPE)
        assert process.stdin is not None
        pickle.dump((setting.path, setting.manifest, setting.region), process.stdin)
        process.stdin.close()
        assert reached.wait(60)
        process.send_signal(signal.SIGKILL)
        process.wait()
        setting.proxy.fault = lambda request: None
        assert 0 < len(setting.find_whole()) < len(_SIZES)
    setting.check_goes_on()


def test_a_server_that_is_killed_while_shards_are_sent_and_read(
    setting: Setting, service: Service
) -> None:
    killed = threading.Event()

    def kill(request: Request, of: str, number: int) -> None:
        with setting.proxy.lock:
            count = sum(getattr(r, of) for r in setting.proxy.requests)
        if count == number and not killed.is_set():
            killed.set()
            service.kill()

    setting.proxy.fault = lambda request: kill(request, "puts_object", 6)
    with pytest.raises(StoreUnavailable, match=r"regions\.eu\.store"):
        setting.upload()
    assert killed.is_set()
    setting.proxy.fault = lambda request: None
    service.start()
    setting.check_goes_on()

    killed.clear()
    sealed = setting.open()
    setting.proxy.take()
    setting.proxy.fault = lambda request: kill(request, "gets_object", 3)
    with pytest.raises(StoreUnavailable, match=r"regions\.eu\.store .* cannot read objects/"):
        [read(sealed, shard) for shard in setting.manifest.shards]
    assert killed.is_set()
    setting.proxy.fault = lambda request: None
    service.start()
    assert setting.find_whole() == {s.name for s in setting.manifest.shards}


def test_a_receipt_for_shards_that_are_gone_is_named(setting: Setting) -> None:
    receipt = setting.upload()
    store = setting.open().store
    check_placed(receipt, store)
    store.put(receipt.placed[3].address, b"short")
    with pytest.raises(DataError, match="0 and holds 1 of another size: train-EU-00003"):
        check_placed(receipt, store)
    empty = file_region(setting.path / "other")
    with pytest.raises(DataError, match=r"region eu: .* lost 10 .*Run `convoy stage upload`"):
        check_placed(receipt, open_store(empty))


def test_a_key_that_is_disabled_is_named_and_waited_for_by_nobody(
    setting: Setting, bao_server: OpenBao, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bao_server.environment.items():
        monkeypatch.setenv(name, value)
    place = f"faults-{uuid.uuid4().hex}"
    key = {"name": "convoy", "mount_point": f"transit/{place}"}
    url = bao_server.wrapping_key_url(place)
    setting.region = setting.region.model_copy(update={"wrapping_key": url})
    transit = bao_server.client().secrets.transit
    disabled = threading.Event()

    def disable(request: Request) -> Fault | None:
        if request.puts_object and not disabled.is_set():
            disabled.set()
            transit.rotate_key(**key)
            transit.update_key_configuration(min_decryption_version=2, **key)
        return None

    # The data key is in memory once it is unwrapped: the run that has it ends well.
    setting.proxy.fault = disable
    setting.upload()
    assert disabled.is_set()
    setting.proxy.take()
    with pytest.raises(KeyringError, match=r"regions\.eu\.wrapping_key .* refuses .*disallowed"):
        setting.upload()
    assert not [r for r in setting.proxy.take() if r.method in ("PUT", "POST")]
    transit.update_key_configuration(min_decryption_version=1, **key)
    assert setting.find_whole() == {s.name for s in setting.manifest.shards}


def test_a_full_disk_is_named_and_the_upload_goes_on_when_there_is_room(tmp_path: Path) -> None:
    script = """
import subprocess, sys
from pathlib import Path
from storage.errors import StoreRefused
from storage.sealed import sealed_size
from tests.storage.conftest import file_region
from tests.storage.test_faults import make_shards, upload
path = Path(sys.argv[1])
manifest = make_shards(path, [300_000] * 8)
region = file_region(path / "disk")
try:
    upload(path, manifest, region)
except StoreRefused as error:
    print(error)
objects = path / "disk/stores/eu/objects"
whole = {p.name: p.stat().st_mtime_ns for p in objects.iterdir() if "~" not in p.name}
assert 0 < len(whole) < 8, whole
assert {p.stat().st_size for p in objects.iterdir()} == {sealed_size(300_000)}
subprocess.run(["mount", "-o", "remount,size=64m", str(path / "disk")], check=True)
upload(path, manifest, region)
now = {p.name: p.stat().st_mtime_ns for p in objects.iterdir()}
assert len(now) == 8 and whole.items() <= now.items()
print("went on")
"""
    (tmp_path / "disk").mkdir()
    mount = 'mount -t tmpfs -o size=1500k none "$1/disk" && exec "$2" -c "$3" "$1"'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "Traceback" not in ran.stderr and ran.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {ran.stderr.strip()}")
    assert "No space left on device): free space on that disk" in ran.stdout, ran.stderr
    assert "went on" in ran.stdout, ran.stderr
