"""Random damage to what Convoy stores: bits flipped, parts cut, parts and objects swapped, and
objects replayed from elsewhere. Every case must be refused; none may crash or hang.

`python -m tests.tamper` (`make tamper`) runs all cases on all cores and exits with 1 when one was
not refused. Each case changes files in a workspace of two dataset versions and two regions, goes
through the real reading path (`read_manifest`, `open_region`, `open`), and puts the files back.
"""

import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

from data.manifest import Manifest, read_manifest
from data.record import Record
from data.residency import Residency, Rule
from data.sealed_shards import SealedShards, open_region
from data.sharding import ShardConfig, write_shards
from data.upload import UploadReceipt, read_receipt, upload_region
from storage.access_log import AccessLog
from storage.errors import ConvoyError
from storage.region import Region
from storage.sealed import SEGMENT_BYTES
from tests.tamper_log import count_refusals

NUM_CASES = 105_000
"""A few exchange two parts that are equal, and are none."""
NUM_LOG_CASES = 5_000
BIG_SHARE = 0.05
SLOW_SECONDS = 10.0
LIMIT_SECONDS = 3600.0
ACCEPTED, REFUSED = "ACCEPTED", "refused"
WAYS = ("flip", "cut", "swap", "replay")
_RULE = Rule(
    name="both",
    jurisdictions=("EU", "US"),
    artifacts=("shard",),
    regions=("eu", "us"),
    mechanism="test",
    evidence="a test",
    expires=date(2999, 1, 1),
)

Outcomes = Counter[tuple[str, str, str]]
"""Cases by what was changed, in which way, and what came of it."""
Case = tuple[Path, bytes, Callable[[], None]]
"""A file, what is to stand in it, and what must then be refused."""


@dataclass(frozen=True)
class Version:
    """A dataset version, placed in both regions."""

    manifest: Manifest
    path: Path
    """Of its manifest file; the receipts lie beside it."""
    receipts: dict[str, UploadReceipt]

    def object(self, root: Path, region: str, number: int) -> Path:
        return root / region / self.receipts[region].placed[number].address

    def envelope(self, root: Path, region: str) -> Path:
        return root / region / "keys" / f"{self.manifest.digest}.json"


@dataclass
class Target:
    """A workspace in which all is well, before and after each case."""

    root: Path
    present: Version
    other: Version
    regions: dict[str, Region]
    log: AccessLog
    opened: SealedShards = field(init=False)

    def __post_init__(self) -> None:
        # As training opens them: what is refused here, the seal alone refuses.
        self.opened = open_region(
            self.present.manifest, self.regions["eu"], self.log, verify="seal"
        )

    def read_shard(self, number: int) -> None:
        list(self.opened.open(self.present.manifest.shards[number]))

    def read_all(self) -> None:
        """As a stage does: the manifest, the receipt for it, the key, and a shard."""
        manifest = read_manifest(self.present.path)
        read_receipt(self.present.path.with_name("eu.json"), manifest)
        self.read_unpinned()

    def read_unpinned(self) -> None:
        """As one who has no receipt."""
        manifest = read_manifest(self.present.path)
        sealed = open_region(manifest, self.regions["eu"], self.log, verify="seal")
        list(sealed.open(manifest.shards[0]))


def make_target(root: Path) -> Target:
    regions = {
        name: Region(
            name=name,
            jurisdiction=name.upper(),
            store=f"file:{root}/{name}",
            wrapping_key=f"file:{root}/{name}.key",
        )
        for name in ("eu", "us")
    }
    log = AccessLog(root / "access.log")
    versions = [
        _make_version(root / name, extra, regions, log) for name, extra in (("a", 0), ("b", 1))
    ]
    target = Target(root, versions[0], versions[1], regions, log)
    target.read_all()
    for number in range(len(target.present.manifest.shards)):
        target.read_shard(number)
    return target


def _make_version(path: Path, extra: int, regions: dict[str, Region], log: AccessLog) -> Version:
    """Small shards, and one of several segments; the other version has all of them and one more."""
    noise = np.random.default_rng(7)
    records = [Record({"id": i, "text": f"record {i}"}, ("EU", "US")[i % 2]) for i in range(64)]
    big = [Record({"image": noise.bytes(400_000)}, "EU") for _ in range(6)]
    (path / "shards").mkdir(parents=True)
    config = ShardConfig(records_per_shard=8, holdout=0.0)
    late = [Record({"id": 99, "text": "late"}, "US") for _ in range(extra)]
    shards = write_shards([*big, *records, *late], path / "shards", config)
    manifest = Manifest(dataset="toy", shards=shards)
    (path / "manifest.json").write_bytes(manifest.content)
    receipts = {}
    for name, region in regions.items():
        policy = Residency(rules=(_RULE,))
        receipts[name] = upload_region(manifest, path / "shards", region, policy, log)
        receipts[name].write(path / f"{name}.json")
    return Version(manifest, path / "manifest.json", receipts)


def run_cases(root: Path, num_cases: int, seed: int) -> Outcomes:
    """So many cases, in a workspace that is made in `root`; the same seed gives the same ones."""
    target, rng = make_target(root), random.Random(seed)
    outcomes: Outcomes = Counter()
    kinds = {"shard": damage_shard, "envelope": damage_envelope, "manifest": damage_manifest}
    for number in range(num_cases):
        way = WAYS[number % len(WAYS)]
        kind = rng.choices(list(kinds), (8, 1, 1))[0]
        path, content, read = kinds[kind](target, way, rng)
        whole = path.read_bytes()
        if content == whole:
            continue  # two equal parts were exchanged
        path.write_bytes(content)
        outcomes[kind, way, _attempt(read)] += 1
        path.write_bytes(whole)
    target.read_all()
    target.log.close()
    return outcomes


def run_log_cases(root: Path, num_cases: int, seed: int) -> Outcomes:
    """The same for the access log and its checkpoints."""
    num_refused = count_refusals(root, num_cases, seed)
    counts = {REFUSED: num_refused, ACCEPTED: num_cases - num_refused}
    return Counter({("log", "any", what): count for what, count in counts.items() if count})


def _attempt(read: Callable[[], None]) -> str:
    begun = time.monotonic()
    try:
        read()
        outcome = ACCEPTED
    except ConvoyError:
        outcome = REFUSED
    except Exception as error:
        return f"crashed ({type(error).__name__})"
    return outcome if time.monotonic() - begun < SLOW_SECONDS else "slow"


def damage_shard(target: Target, way: str, rng: random.Random) -> Case:
    shards = target.present.manifest.shards
    big = max(range(len(shards)), key=lambda number: shards[number].num_bytes)
    number = big if rng.random() < BIG_SHARE else rng.randrange(len(shards))
    path = target.present.object(target.root, "eu", number)
    other = target.present.object(target.root, "eu", (number + 1) % len(shards))
    elsewhere = [
        version.object(target.root, region, number)
        for version in (target.present, target.other)
        for region in ("eu", "us")
    ]
    content = _damage(path.read_bytes(), way, rng, other, elsewhere[1:])
    return path, content, lambda: target.read_shard(number)


def damage_envelope(target: Target, way: str, rng: random.Random) -> Case:
    path = target.present.envelope(target.root, "eu")
    other = target.present.envelope(target.root, "us")
    elsewhere = [target.other.envelope(target.root, region) for region in ("eu", "us")]
    return path, _damage(path.read_bytes(), way, rng, other, elsewhere), target.read_unpinned


def damage_manifest(target: Target, way: str, rng: random.Random) -> Case:
    path = target.present.path
    if way == "replay":
        return path, target.other.path.read_bytes(), target.read_all
    if way == "swap" and rng.random() < 0.5:  # still a manifest, of shards in another order
        shards = list(target.present.manifest.shards)
        rng.shuffle(shards)
        return path, Manifest(dataset="toy", shards=tuple(shards)).content, target.read_unpinned
    return path, _damage(path.read_bytes(), way, rng, None, []), target.read_unpinned


def _damage(
    whole: bytes, way: str, rng: random.Random, other: Path | None, elsewhere: list[Path]
) -> bytes:
    if way == "flip":
        place, bit = divmod(rng.randrange(8 * len(whole)), 8)
        return whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
    if way == "cut":
        start, end = sorted(rng.sample(range(len(whole) + 1), 2))
        if rng.random() < 0.2 and len(whole) > SEGMENT_BYTES:
            start = SEGMENT_BYTES * rng.randint(1, len(whole) // SEGMENT_BYTES)
        return whole[:start] + (whole[end:] if rng.random() < 0.5 else b"")
    if way == "replay":
        return rng.choice(elsewhere).read_bytes()
    if other is not None and rng.random() < 0.5:
        return other.read_bytes()
    if len(whole) > 2 * SEGMENT_BYTES and rng.random() < 0.5:
        size = first = SEGMENT_BYTES  # whole segments, the first two after the header's
        second = len(whole) - size
    else:
        size = rng.randint(1, len(whole) // 2)
        first = rng.randint(0, len(whole) - 2 * size)
        second = rng.randint(first + size, len(whole) - size)
    middle = whole[first + size : second]
    parts = (whole[:first], whole[second : second + size], middle, whole[first : first + size])
    return b"".join(parts) + whole[second + size :]


def _run_share(share: tuple[int, int, int]) -> Outcomes:
    num_cases, num_log_cases, seed = share
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        outcomes = run_cases(root / "data", num_cases, seed)
        return outcomes + run_log_cases(root / "log", num_log_cases, seed)


def main() -> int:
    """Run all cases, print what came of them, and return 1 unless all were refused."""
    num_processes = multiprocessing.cpu_count()
    shares = [
        (-(-NUM_CASES // num_processes), -(-NUM_LOG_CASES // num_processes), seed)
        for seed in range(num_processes)
    ]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        outcomes: Outcomes = sum(
            pool.map_async(_run_share, shares).get(timeout=LIMIT_SECONDS), Counter()
        )
    for (kind, way, outcome), count in sorted(outcomes.items()):
        print(f"{kind:<10}{way:<8}{outcome:<24}{count:>8}")
    num_bad = sum(count for (_, _, outcome), count in outcomes.items() if outcome != REFUSED)
    print(f"{outcomes.total()} cases, {num_bad} not refused")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
