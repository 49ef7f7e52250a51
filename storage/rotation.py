"""Rotation and shredding: done to the envelopes of a region, never to its shards."""

import getpass
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from storage.access_log import AccessEntry, AccessLog, Action
from storage.envelope import (
    StoredEnvelope,
    envelope_name,
    list_envelopes,
    rewrap_envelope,
    shred_envelope,
)
from storage.errors import ObjectMissing, StoreUnavailable
from storage.keyring import FileKeyring, open_keyring
from storage.region import Region
from storage.store import open_store


@dataclass(frozen=True, slots=True)
class EnvelopeDone:
    """An envelope that was wrapped anew or shredded."""

    region: str
    dataset: str
    version: str


def rotate(
    regions: Sequence[Region],
    log: AccessLog,
    on_envelope: Callable[[EnvelopeDone], None] = lambda done: None,
) -> tuple[EnvelopeDone, ...]:
    """Wrap the data key of every dataset version in the regions by their present wrapping key.

    All regions with that wrapping key must be given. A key file is first renewed, and its old key
    removed when nothing is wrapped by it any more. Killed at any moment, everything opens, and
    calling it again ends what was begun. Raises KeyringError, SealBroken, ObjectChanged,
    StoreUnavailable.
    """
    assert len({region.wrapping_key for region in regions}) == 1
    keyring = open_keyring(regions[0])
    if not any(list_envelopes(region, open_store(region)) for region in regions):
        return ()
    if isinstance(keyring, FileKeyring):
        keyring.renew()
    done: list[EnvelopeDone] = []
    for region in regions:
        done += _rewrap_region(region, log, on_envelope)
    if isinstance(keyring, FileKeyring):
        keyring.retire()
    return tuple(done)


def _rewrap_region(
    region: Region, log: AccessLog, on_envelope: Callable[[EnvelopeDone], None]
) -> list[EnvelopeDone]:
    store, keyring = open_store(region), open_keyring(region)
    done: dict[str, EnvelopeDone] = {}
    # Again until a look finds no other: an upload may have made a key by the old wrapping key.
    while new := [e for e in list_envelopes(region, store) if e.version not in done]:
        for envelope in new:
            rewrap_envelope(region, store, keyring, envelope)
            _record(log, region, "rotate", envelope, "wrapped by the present wrapping key")
            done[envelope.version] = EnvelopeDone(region.name, envelope.dataset, envelope.version)
            on_envelope(done[envelope.version])
    return list(done.values())


def find_envelopes(
    region: Region, dataset: str, version: str | None = None
) -> tuple[StoredEnvelope, ...]:
    """The envelopes of a dataset in a region, or that of one version, given by its first digits.

    Raises ObjectMissing if there is none, SealBroken for an object that is no envelope.
    """
    store = open_store(region)
    found = tuple(
        envelope
        for envelope in list_envelopes(region, store)
        if envelope.dataset == dataset and envelope.version.startswith(version or "")
    )
    if not found:
        what = f"version {version} of dataset '{dataset}'" if version else f"dataset '{dataset}'"
        raise ObjectMissing(
            f"regions.{region.name}.store ({region.store}) has no key of {what}: it was shredded "
            "or never uploaded; `convoy keys list` shows what there is"
        )
    return found


def shred(
    region: Region, envelopes: Sequence[StoredEnvelope], log: AccessLog
) -> tuple[EnvelopeDone, ...]:
    """Destroy the data keys in these envelopes: what they sealed in the region stays sealed.

    Raises StoreUnavailable where the store does not let every version of an envelope go.
    """
    store, actor = open_store(region), getpass.getuser()
    done = []
    for envelope in envelopes:
        try:
            shred_envelope(region, store, envelope.dataset, envelope.version, actor)
        except StoreUnavailable as error:
            _record(log, region, "refuse", envelope, f"shred: {error}", refused=True)
            raise
        _record(log, region, "shred", envelope, f"its data key of {envelope.dataset} is destroyed")
        done.append(EnvelopeDone(region.name, envelope.dataset, envelope.version))
    return tuple(done)


def _record(
    log: AccessLog,
    region: Region,
    action: Action,
    envelope: StoredEnvelope,
    reason: str,
    *,
    refused: bool = False,
) -> None:
    log.append(
        AccessEntry(
            region=region.name,
            action=action,
            object=envelope_name(envelope.version),
            artifact="key",
            decision="refused" if refused else "allowed",
            reason=reason,
            key_id=region.wrapping_key,
        )
    )
