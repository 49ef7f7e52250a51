"""The sealed cache: no store read twice, a byte limit, nothing half-written, nobody else's eyes."""

import multiprocessing
import os
import secrets
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from data.cache import SealedCache
from data.errors import CacheUnusable, ShardBroken
from data.manifest import Manifest
from data.record import Record
from data.sealed_shards import SealedShards
from data.sharding import ShardConfig, write_shards
from storage.access_log import AccessLog
from storage.open_object import OpenObject
from storage.region import Region
from storage.store import ObjectStore, open_store
from training.loader import Loader

LIMIT = 1000


def kept(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.sealed"))


def test_what_is_put_is_got(tmp_path: Path) -> None:
    cache = SealedCache(tmp_path / "cache", LIMIT)
    assert cache.get("objects/a") is None
    cache.put("objects/a", b"sealed")
    assert cache.get("objects/a") == b"sealed"
    assert SealedCache(tmp_path / "cache", LIMIT).get("objects/a") == b"sealed"
    cache.remove("objects/a")
    assert cache.get("objects/a") is None
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_least_recently_read_goes_first(tmp_path: Path) -> None:
    cache = SealedCache(tmp_path, LIMIT)
    for number in range(3):
        cache.put(str(number), bytes(300))
        os.utime(tmp_path / f"{number}.sealed", (number, number))
    assert cache.get("0") is not None
    cache.put("3", bytes(300))
    assert [cache.get(str(number)) is not None for number in range(4)] == [True, False, True, True]
    assert kept(tmp_path) == 900


def test_what_is_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache = SealedCache(tmp_path, LIMIT)
    cache.put("small", bytes(10))
    cache.put("large", bytes(LIMIT + 1))
    assert cache.get("large") is None
    assert cache.get("small") == bytes(10)


def test_what_a_killed_writer_left_is_removed_and_counted_anew(tmp_path: Path) -> None:
    cache = SealedCache(tmp_path, LIMIT)
    cache.put("a", bytes(400))
    (tmp_path / "half.new").write_bytes(bytes(500))
    (tmp_path / "total").write_bytes(f"{LIMIT * 9:<32}".encode())
    cache.put("b", bytes(400))
    assert cache.get("a") is not None
    assert cache.get("b") is not None
    assert not (tmp_path / "half.new").exists()
    assert int((tmp_path / "total").read_bytes()) == 800


def _churn(directory: Path, seed: int) -> None:
    cache = SealedCache(directory, LIMIT)
    for number in range(60):
        name = str((number * 7 + seed) % 9)
        found = cache.get(name)
        assert found is None or found == name.encode() * 200
        cache.put(name, name.encode() * 200)


def test_processes_share_it(tmp_path: Path) -> None:
    """Three that write, read and evict at once: whole objects alone, and never over the limit."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_churn, args=(tmp_path, seed)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert 0 < kept(tmp_path) <= LIMIT
    assert int((tmp_path / "total").read_bytes()) >= kept(tmp_path)


def test_a_directory_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared").chmod(0o755)
    with pytest.raises(CacheUnusable, match=r"train\.cache\.directory.*chmod 700"):
        SealedCache(tmp_path / "shared", LIMIT)


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheUnusable, match=r"train\.cache\.directory.*file"):
        SealedCache(tmp_path / "file", LIMIT)


class Counting:
    """A store that counts what is got from it."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.got: Counter[str] = Counter()

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        self.got[name] += 1
        return self._store.get(name, start, end)

    def open(self, name: str) -> AbstractContextManager[OpenObject]:
        self.got[name] += 1
        return self._store.open(name)


@pytest.fixture
def sealed(tmp_path: Path) -> SealedShards:
    """Twelve shards in a directory, behind a store that counts, with a cache."""
    (tmp_path / "shards").mkdir()
    shards = write_shards(
        (Record({"number": number}, "EU") for number in range(120)),
        tmp_path / "shards",
        ShardConfig(records_per_shard=10, holdout=0.0),
    )
    manifest = Manifest(dataset="numbers", shards=shards)
    region = Region(
        name="eu",
        jurisdiction="EU",
        store=f"file:{tmp_path}/store",
        wrapping_key=f"file:{tmp_path}/key",
    )
    store = open_store(region)
    shards_there = SealedShards(
        manifest,
        region,
        Counting(store),  # type: ignore[arg-type]
        secrets.token_bytes(32),
        AccessLog(tmp_path / "access.log"),
        SealedCache(tmp_path / "cache", 1 << 20),
    )
    place(shards_there, store, tmp_path / "shards")
    return shards_there


def place(sealed: SealedShards, store: ObjectStore, directory: Path) -> None:
    from storage.sealed import seal

    for shard in sealed.manifest.shards:
        content = (directory / shard.name).read_bytes()
        store.put(sealed.address(shard), seal(sealed.key, content, sealed._associated_data(shard)))


def read_epoch(sealed: SealedShards, epoch: int) -> list[int]:
    loader = Loader(
        sealed,
        sealed.manifest.shards,
        lambda records: [record["number"] for record in records],  # type: ignore[arg-type,return-value]
        global_batch=10,
        replica=0,
        num_replicas=1,
        seed=1,
        window=4,
    )
    batches = loader.batches(epoch * 120)
    numbers = [number for _ in range(12) for number in next(batches)]
    batches.close()
    return numbers  # type: ignore[return-value]


def test_a_second_epoch_asks_the_store_for_nothing(sealed: SealedShards) -> None:
    counting: Counting = sealed.store  # type: ignore[assignment]
    assert sorted(read_epoch(sealed, 0)) == list(range(120))
    assert counting.got == {sealed.address(shard): 1 for shard in sealed.manifest.shards}
    counting.got.clear()
    assert sorted(read_epoch(sealed, 1)) == list(range(120))
    assert not counting.got


def test_a_broken_copy_is_replaced_from_the_store(sealed: SealedShards, tmp_path: Path) -> None:
    counting: Counting = sealed.store  # type: ignore[assignment]
    read_epoch(sealed, 0)
    counting.got.clear()
    shard = sealed.manifest.shards[3]
    [copy] = (tmp_path / "cache").glob(f"*{sealed.address(shard)[-64:]}*")
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert sorted(read_epoch(sealed, 1)) == list(range(120))
    assert counting.got == {sealed.address(shard): 1}
    assert copy.read_bytes() == whole


def test_a_shard_that_is_broken_in_the_store_is_not_kept(
    sealed: SealedShards, tmp_path: Path
) -> None:
    shard = sealed.manifest.shards[3]
    path = tmp_path / "store" / sealed.address(shard)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardBroken, match=f"shard {shard.name} .*region eu"):
        read_epoch(sealed, 0)
    assert sealed.cache is not None
    assert sealed.cache.get(sealed.address(shard)) is None
