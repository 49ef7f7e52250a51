"""One contract, held by every kind of store."""

import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage.errors import ObjectExists, ObjectMissing
from storage.region import Region
from storage.store import ObjectInfo, check_store, open_store


def test_what_is_put_is_got_listed_and_there(store_region: Region) -> None:
    store = open_store(store_region)
    assert list(store.list()) == []
    assert not store.exists("shards/a")
    store.put("shards/a", b"alpha")
    store.put("shards/b.arrow", memoryview(b"beta"))
    store.put("keys/v-1.json", bytearray(b""))
    assert store.get("shards/a") == b"alpha"
    assert store.get("shards/b.arrow") == b"beta"
    assert store.get("keys/v-1.json") == b""
    assert store.exists("shards/a")
    assert not store.exists("shards")
    assert list(store.list()) == [
        ObjectInfo("keys/v-1.json", 0),
        ObjectInfo("shards/a", 5),
        ObjectInfo("shards/b.arrow", 4),
    ]


def test_list_takes_a_folder(store_region: Region) -> None:
    store = open_store(store_region)
    for name in ("a/1", "a/b/2", "ab/3"):
        store.put(name, b"x")
    assert [info.name for info in store.list("a")] == ["a/1", "a/b/2"]
    assert [info.name for info in store.list("a/")] == ["a/1", "a/b/2"]
    assert list(store.list("none")) == []
    assert list(store.list("a/1/none")) == []


def test_ranges_are_slices(store_region: Region) -> None:
    store, data = open_store(store_region), bytes(range(10))
    store.put("o", data)
    for start in (0, 1, 9, 10, 11):
        assert store.get("o", start) == data[start:]
        for end in (start, start + 1, 10, 99):
            if end >= start:
                assert store.get("o", start, end) == data[start:end]
    with pytest.raises(ValueError, match="not a byte range"):
        store.get("o", -1)
    with pytest.raises(ValueError, match="not a byte range"):
        store.get("o", 3, 2)


def test_an_open_object_is_read_piece_by_piece(store_region: Region) -> None:
    store, data = open_store(store_region), secrets.token_bytes(3 << 20)
    store.put("o", data)
    for _ in range(2):
        with store.open("o") as found:
            assert found.num_bytes == len(data)
            for start, end in ((0, 9), (9, 1 << 20), (5, 3 << 20)):
                assert found.read(start, end) == data[start:end]
            assert found.read(len(data) - 1, len(data) + 9) == data[-1:]
    with pytest.raises(ObjectMissing, match=r"regions\.eu\.store .* has no no/such"):
        store.open("no/such").__enter__()


@pytest.mark.parametrize(("start", "end"), [(0, None), (1, None), (1, 2), (1, 1)])
def test_a_missing_object_is_named(store_region: Region, start: int, end: int | None) -> None:
    with pytest.raises(ObjectMissing, match=r"regions\.eu\.store .* has no no/such"):
        open_store(store_region).get("no/such", start, end)


def test_put_replaces_or_refuses_to(store_region: Region) -> None:
    store = open_store(store_region)
    store.put("o", b"first", overwrite=False)
    with pytest.raises(ObjectExists, match="already has o"):
        store.put("o", b"second", overwrite=False)
    assert store.get("o") == b"first"
    store.put("o", b"third")
    assert store.get("o") == b"third"


def test_of_racing_creators_one_wins(store_region: Region) -> None:
    num_writers = 8
    store, barrier = open_store(store_region), threading.Barrier(num_writers)

    def create(writer: int) -> int | None:
        barrier.wait()
        try:
            store.put("o", b"%d" % writer, overwrite=False)
        except ObjectExists:
            return None
        return writer

    with ThreadPoolExecutor(num_writers) as pool:
        winners = [each for each in pool.map(create, range(num_writers)) if each is not None]
    assert len(winners) == 1
    assert store.get("o") == b"%d" % winners[0]


def test_a_reader_sees_whole_objects_only(store_region: Region) -> None:
    store, versions = open_store(store_region), [bytes([i]) * 300_000 for i in range(2)]
    store.put("o", versions[0])
    done = threading.Event()

    def write() -> None:
        for i in range(30):
            store.put("o", versions[i % 2])
        done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not done.is_set() and not writing.done():
            assert store.get("o") in versions
        writing.result()


def test_an_object_of_many_parts(store_region: Region) -> None:
    store, data = open_store(store_region), bytes(range(256)) * (20 << 12)
    store.put("big", data)
    assert store.get("big") == data
    assert store.get("big", 8 << 20, (8 << 20) + 5) == data[8 << 20 : (8 << 20) + 5]


def test_parts_make_one_object(store_region: Region) -> None:
    store = open_store(store_region)
    parts = [os.urandom(8 << 20), os.urandom(8 << 20), b"the end"]
    store.put("big", iter(parts))
    assert store.get("big") == b"".join(parts)


def test_parts_that_end_early_make_no_object(store_region: Region) -> None:
    def parts() -> Iterator[bytes]:
        yield bytes(8 << 20)
        raise LookupError("no more")

    store = open_store(store_region)
    with pytest.raises(LookupError, match="no more"):
        store.put("o", parts())
    assert list(store.list()) == []


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "../a", "a/..", "a/./b", "a b", "ä", "~"])
def test_names_that_leave_the_store_are_refused(store_region: Region, name: str) -> None:
    store = open_store(store_region)
    with pytest.raises(ValueError, match="not an object name"):
        store.put(name, b"x")
    with pytest.raises(ValueError, match="not an object name"):
        store.get(name)
    with pytest.raises(ValueError, match="not an object name"):
        store.exists(name)


def test_check_store_passes_again_and_again(store_region: Region) -> None:
    check_store(store_region)
    check_store(store_region)


def test_memory_is_shared_by_region_and_name(region: Region) -> None:
    memory = region.model_copy(update={"store": "memory:shared"})
    open_store(memory).put("o", b"x")
    assert open_store(memory).exists("o")
    other = memory.model_copy(update={"name": "us"})
    assert not open_store(other).exists("o")
