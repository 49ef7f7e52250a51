"""CPU seconds of the client for each GB that is put into an S3 service over TLS.

Ours: `upload_region`, which reads, hashes, seals and sends, and the store alone, which reads and
sends. Peer: boto3's `upload_file` with its defaults, which reads and sends. Same files, same
service (SeaweedFS), one process, alternating; the service's own CPU time is not counted.
"""

import hashlib
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.table import Row, publish
from data.manifest import Manifest
from data.shard import Shard
from data.upload import upload_region
from storage.access_log import AccessLog
from storage.buffers import Buffers
from storage.region import Region
from storage.sealed import PART_BYTES
from storage.store import ObjectStore, open_store
from tests.residency import EU_AT_HOME
from tests.servers import SeaweedFS, seaweedfs

NUM_FILES = 4
FILE_BYTES = 48 << 20
REPETITIONS = 3
LIMIT = 0.6


def make_files(directory: Path) -> Manifest:
    """Files of random bytes: nobody looks into a shard on its way."""
    shards = []
    for number in range(NUM_FILES):
        content = os.urandom(FILE_BYTES)
        name = f"train-EU-{number:05}.arrow"
        (directory / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        shards.append(Shard(name, digest, "train", "EU", 1, FILE_BYTES))
    return Manifest(dataset="transfer", shards=tuple(shards))


def read_parts(path: Path, buffers: Buffers) -> Iterator[memoryview]:
    """The parts of a file, each in memory that is used again."""
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(part := buffers.lend(PART_BYTES)):
            yield part[:num_bytes]


def put_files(store: ObjectStore, paths: list[Path]) -> None:
    """Send files as they are, one after the other."""
    buffers = Buffers(PART_BYTES)
    for path in paths:
        store.put(path.name, read_parts(path, buffers))


def upload_files(client: Any, paths: list[Path], prefix: str) -> None:
    """Send files as they are by boto3, one after the other."""
    for path in paths:
        client.upload_file(str(path), "transfer", f"{prefix}/{path.name}")


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of this process, all threads together, for a GB."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    work()
    after, ended = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return (
        cpu / (NUM_FILES * FILE_BYTES / 1e9),
        (ended - started) / (NUM_FILES * FILE_BYTES / 1e9),
    )


def compare(server: SeaweedFS, directory: Path) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds a GB of each way, several times in turn; each time to new names."""
    manifest = make_files(directory)
    paths = [directory / shard.name for shard in manifest.shards]
    client = server.client()
    seconds: dict[str, list[tuple[float, float]]] = {"sealed": [], "plain": [], "boto3": []}
    log = AccessLog(directory / "access.log")
    for number in range(REPETITIONS + 1):
        sealed, plain = (
            Region(
                name="eu",
                jurisdiction="EU",
                store=server.store_url("transfer", f"{kind}-{number}"),
                wrapping_key=f"file:{directory}/eu.key",
            )
            for kind in ("sealed", "plain")
        )
        ways: dict[str, Callable[[], object]] = {
            "sealed": partial(upload_region, manifest, directory, sealed, EU_AT_HOME, log),
            "plain": partial(put_files, open_store(plain), paths),
            "boto3": partial(upload_files, client, paths, f"boto3-{number}"),
        }
        for name, way in ways.items():
            measured = measure(way)
            if number:  # the first time loads and connects
                seconds[name].append(measured)
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="convoy-transfer-") as name:
        directory = Path(name)
        (directory / "server").mkdir()
        (directory / "files").mkdir()
        with seaweedfs(directory / "server", tls=True) as server:
            os.environ.update(server.environment)
            server.make_bucket("transfer")
            seconds = compare(server, directory / "files")
    reference = median(cpu for cpu, _ in seconds["boto3"])
    rows = [
        Row(
            case=case,
            ours=(ours := median(cpu for cpu, _ in seconds[name])),
            reference=reference,
            ratio=ours / reference,
            target=f"at most {LIMIT}",
            holds=ours / reference <= LIMIT,
        )
        for name, case in (
            ("sealed", "upload: read, hash, seal, send"),
            ("plain", "store alone: read, send"),
        )
    ]
    publish("transfer", "CPU s a GB", rows)
    walls = {name: median(wall for _, wall in values) for name, values in seconds.items()}
    print(", ".join(f"{name} {wall:.1f} s a GB" for name, wall in walls.items()), "of wall time")


if __name__ == "__main__":
    main()
