"""One region's sealed shards: put and open. The only code where data meets storage."""

from collections.abc import Callable
from dataclasses import dataclass, field

from data.cache import SealedCache
from data.errors import ShardBroken
from data.manifest import Manifest
from data.shard import OpenShard, Shard, Verify, open_shard
from storage.access_log import AccessEntry, AccessLog, Action
from storage.buffers import Buffers, Memory
from storage.envelope import (
    associated_data,
    content_address,
    envelope_name,
    obtain_data_key,
    unwrap_data_key,
)
from storage.errors import ObjectMissing, SealBroken
from storage.keyring import open_keyring
from storage.open_object import OpenObject
from storage.region import Region
from storage.sealed import (
    PART_BYTES,
    SealedReader,
    open_whole,
    seal_parts,
    sealed_size,
)
from storage.store import ObjectStore, open_store


@dataclass(frozen=True)
class SealedShards:
    """One region's sealed shards of one dataset version, and the key that opens them."""

    manifest: Manifest
    region: Region
    store: ObjectStore = field(repr=False)
    key: bytes = field(repr=False)
    log: AccessLog = field(repr=False)
    cache: SealedCache | None = field(default=None, repr=False)
    verify: Verify = "digest"
    is_new: bool = False
    """Whether the key was made when this was opened: no earlier upload left anything."""

    def address(self, shard: Shard) -> str:
        """The object's name in the store."""
        return f"objects/{content_address(self.key, shard.digest)}"

    def holds(self, shard: Shard) -> bool:
        """Whether the store holds the whole object: its size is right, and its header and last
        segment authenticate."""
        address = self.address(shard)
        sealed_bytes = sealed_size(shard.num_bytes)

        def read(start: int, end: int) -> bytes:
            # At the end one byte more is asked for, and must not be there.
            return self.store.get(address, start, end + 1 if end == sealed_bytes else end)

        try:
            SealedReader(self.key, self._associated_data(shard), read, sealed_bytes)
        except (ObjectMissing, SealBroken):
            return False
        return True

    def put(self, shard: Shard, fill: Callable[[memoryview], None], buffers: Buffers) -> None:
        """Seal a shard while it is placed. `fill` gives its plaintext, piece by piece: see
        `seal_parts`; what it raises leaves nothing in the store."""
        address, num_bytes = self.address(shard), sealed_size(shard.num_bytes)
        parts = seal_parts(self.key, fill, shard.num_bytes, self._associated_data(shard), buffers)
        self.store.put(address, next(parts) if num_bytes <= PART_BYTES else parts)
        record_access(self.log, self.region, "put", address, num_bytes)

    def open(self, shard: Shard, memory: Memory | None = None) -> OpenShard:
        """Get a shard, authenticate every byte of it and give its records, in memory alone.

        `memory` lends what its content lies in; without, that is new.
        A copy in the cache is authenticated in the same way; a broken one is forgotten and the
        store is asked. The access log has what left the store, so what the cache gave is not in it.
        Raises ShardBroken, which names the shard, the region and the reason.
        """
        where = f"region {self.region.name}"
        memory = memory or Memory(shard.num_bytes, 1)
        content = self._open_cached(shard, memory)
        if content is None:
            content = self._open_stored(shard, memory, where)
        return open_shard(shard, content, where, verify=self.verify)

    def _open_cached(self, shard: Shard, memory: Memory) -> memoryview | None:
        if self.cache is None:
            return None
        address = self.address(shard)
        sealed = self.cache.get(address)
        if sealed is None:
            return None
        view = memoryview(sealed)
        try:
            found = OpenObject(len(view), lambda start, end: view[start:end])
            return self._unseal(shard, found, memory)
        except SealBroken:
            self.cache.remove(address)
            return None

    def _open_stored(self, shard: Shard, memory: Memory, where: str) -> memoryview:
        address = self.address(shard)
        try:
            with self.store.open(address) as found:
                content = self._unseal(shard, found, memory)
                if self.cache is not None:
                    self.cache.put(address, found.read(0, found.num_bytes))
        except ObjectMissing:
            raise ShardBroken(
                f"shard {shard.name} is not in {where} ({address}): run `convoy stage upload`"
            ) from None
        except SealBroken as error:
            raise ShardBroken(
                f"shard {shard.name} in {where} ({address}): {error}. "
                "Delete the object and run `convoy stage upload`, which places it again."
            ) from None
        record_access(self.log, self.region, "get", address, found.num_bytes)
        return content

    def _unseal(self, shard: Shard, found: OpenObject, memory: Memory) -> memoryview:
        place = self._associated_data(shard)
        return open_whole(self.key, place, found.read, found.num_bytes, memory)

    def _associated_data(self, shard: Shard) -> bytes:
        return associated_data(
            dataset=self.manifest.dataset,
            version=self.manifest.digest,
            region=self.region.name,
            jurisdiction=shard.jurisdiction,
            name=self.address(shard),
        )


def open_region(
    manifest: Manifest,
    region: Region,
    log: AccessLog,
    *,
    writable: bool = False,
    cache: SealedCache | None = None,
    verify: Verify = "digest",
) -> SealedShards:
    """Unwrap the region's data key for this dataset version; `writable` makes it when missing.

    `verify` is what opening a shard asks of it.
    """
    store = open_store(region)
    name = envelope_name(manifest.digest)
    obtain = obtain_data_key if writable else unwrap_data_key
    is_new = writable and not store.exists(name)
    key = obtain(region, store, open_keyring(region), manifest.dataset, manifest.digest)
    if is_new:
        record_access(log, region, "generate", name)
    record_access(log, region, "unwrap", name)
    return SealedShards(manifest, region, store, key, log, cache, verify, is_new)


def record_access(
    log: AccessLog,
    region: Region,
    action: Action,
    name: str,
    num_bytes: int = 0,
    refused: str | None = None,
    artifact: str = "shard",
) -> None:
    """Append what happened to an object of an artifact class. Raises StorageError."""
    log.append(
        AccessEntry(
            region=region.name,
            action=action,
            object=name,
            artifact=artifact,
            num_bytes=num_bytes,
            decision="refused" if refused else "allowed",
            reason=refused or "residency",
            key_id=region.wrapping_key if action in ("generate", "unwrap") else "",
        )
    )
