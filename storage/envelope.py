"""Key envelopes: the one data key of a dataset version in a region, wrapped, beside its objects.

The envelope is the object keys/VERSION.json of the region's store. It is canonical JSON, names the
dataset, version, region and jurisdiction whose key it holds, and carries a MAC under a key derived
from that very data key: an envelope that was edited, or moved from another region or version, is
refused. Deleting it makes that dataset version unreadable in that region for good, and leaves the
note shredded/VERSION.json, so that nobody takes it for an accident. docs/format.md specifies both.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from storage.canonical import canonical_json
from storage.errors import KeyShredded, ObjectExists, ObjectMissing, SealBroken
from storage.keyring import DataKey, EncryptionContext, Keyring, RotatingKeyring
from storage.region import Region
from storage.store import KeyStore, ObjectStore

_FORMAT = "convoy-envelope/1"
_MAC_INFO = b"convoy/envelope-mac/1"
_ADDRESS_INFO = b"convoy/content-address/1"
_NOTE_INFO = b"convoy/note-mac/1"
_KEYS = "keys"
_SHREDDED = "shredded"
_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class _Envelope(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: str
    dataset: str
    version: str
    region: str
    jurisdiction: str
    wrapped_key: str
    mac: str


class ShredNote(BaseModel):
    """Says that the data key of a dataset version was destroyed on purpose. It proves nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["convoy-shredded/1"] = "convoy-shredded/1"
    dataset: str
    version: str
    region: str
    time: str
    actor: str


@dataclass(frozen=True, slots=True)
class StoredEnvelope:
    """An envelope as it lies in a store: what it says of itself, which nothing has proved yet."""

    dataset: str
    version: str
    content: bytes = field(repr=False)


def obtain_data_key(
    region: Region, store: ObjectStore, keyring: Keyring, dataset: str, version: str
) -> bytes:
    """Return the data key of a dataset version in a region, made now if there is none yet.

    Of several that make one at once the first to be stored wins, and all return that one. Raises
    StoreUnavailable, KeyringError, SealBroken.
    """
    if not store.exists(envelope_name(version)):
        context = _context(region, dataset, version)
        envelope = _encode(keyring.generate(context), context)
        with contextlib.suppress(ObjectExists):
            store.put(envelope_name(version), envelope, overwrite=False)
    # The stored one counts: another writer may have been first, and it must open again anyway.
    return unwrap_data_key(region, store, keyring, dataset, version)


def unwrap_data_key(
    region: Region, store: ObjectStore, keyring: Keyring, dataset: str, version: str
) -> bytes:
    """Return the data key of a dataset version in a region.

    Raises ObjectMissing if the region's store has no envelope for that version, KeyShredded if it
    was shredded, KeyringError if the wrapping key refuses, SealBroken if the envelope was changed
    or belongs elsewhere.
    """
    name = envelope_name(version)
    try:
        stored = store.get(name)
    except ObjectMissing:
        _explain_shredded(region, store, dataset, version)
        raise ObjectMissing(
            f"regions.{region.name}.store ({region.store}) has no {name}, the wrapped key of "
            f"version {version} of dataset {dataset!r}: upload that version, or choose another"
        ) from None
    where = _where(region, version)
    context = _context(region, dataset, version)
    wrapped = _wrapped_key(stored, context, where)
    data_key = keyring.unwrap(wrapped, context)
    _check_mac(stored, DataKey(data_key, wrapped), context, where)
    return data_key


def rewrap_envelope(
    region: Region, store: KeyStore, keyring: RotatingKeyring, envelope: StoredEnvelope
) -> None:
    """Put in the envelope's place one that holds the same data key, wrapped by the present key.

    The envelope is authenticated before, and the new one is seen to open; whoever reads meanwhile
    gets the old one or the new one, whole. Raises ObjectChanged when somebody else replaced or
    shredded it meanwhile, KeyringError, SealBroken, StoreUnavailable.
    """
    where = _where(region, envelope.version)
    context = _context(region, envelope.dataset, envelope.version)
    before = _wrapped_key(envelope.content, context, where)
    after = keyring.rewrap(before, context)
    data_key = keyring.unwrap(after, context)
    _check_mac(envelope.content, DataKey(data_key, before), context, where)
    renewed = _encode(DataKey(data_key, after), context)
    store.replace(envelope_name(envelope.version), envelope.content, renewed)


def shred_envelope(region: Region, store: KeyStore, dataset: str, version: str, actor: str) -> None:
    """Delete the envelope of a dataset version for good, and leave a note that says so.

    The note comes first: a kill in between leaves a key that opens, and shredding again ends it.
    Raises StoreUnavailable.
    """
    note = ShredNote(
        dataset=dataset,
        version=version,
        region=region.name,
        time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        actor=actor,
    )
    store.put(_note_name(version), canonical_json(note.model_dump()))
    store.delete(envelope_name(version))


def list_envelopes(region: Region, store: ObjectStore) -> tuple[StoredEnvelope, ...]:
    """The envelopes of a region, by name. Raises SealBroken for an object that is none."""
    found = []
    for info in store.list(_KEYS):
        version = info.name.removeprefix(f"{_KEYS}/").removesuffix(".json")
        where = _where(region, version)
        content = store.get(info.name)
        envelope = _parse(content, where)
        if info.name != envelope_name(envelope.version):
            raise _broken(where, f"is for version {envelope.version!r}")
        found.append(StoredEnvelope(envelope.dataset, envelope.version, content))
    return tuple(found)


def list_shredded(store: ObjectStore) -> tuple[ShredNote, ...]:
    """The versions that were shredded in a region and have no key now."""
    names = [info.name for info in store.list(_SHREDDED)]
    notes = [ShredNote.model_validate_json(store.get(name)) for name in names]
    return tuple(note for note in notes if not store.exists(envelope_name(note.version)))


def envelope_name(version: str) -> str:
    """Return the object name of the envelope of a dataset version."""
    return f"{_KEYS}/{version}.json"


def content_address(data_key: bytes, digest: str) -> str:
    """Return the keyed name (64 hex digits) of content with this SHA-256 (64 hex digits).

    HMAC-SHA256 under a key derived from the data key: without the key, a name confirms no guess
    of the content.
    """
    if not _SHA256_HEX.fullmatch(digest):
        raise ValueError(f"not a SHA-256 in lower-case hex: {digest!r}")
    return hmac.new(_derive(data_key, _ADDRESS_INFO), digest.encode(), hashlib.sha256).hexdigest()


def authenticate(data_key: bytes, content: bytes) -> str:
    """Return the MAC (64 hex digits) of a readable note, such as a checkpoint's commit marker.

    HMAC-SHA256 under a key derived from the data key and used for nothing else.
    """
    return hmac.new(_derive(data_key, _NOTE_INFO), content, hashlib.sha256).hexdigest()


def associated_data(dataset: str, version: str, region: str, jurisdiction: str, name: str) -> bytes:
    """Return what binds a sealed object to its place: canonical JSON of the five fields."""
    return canonical_json(
        {
            "dataset": dataset,
            "version": version,
            "region": region,
            "jurisdiction": jurisdiction,
            "name": name,
        }
    )


def _context(region: Region, dataset: str, version: str) -> EncryptionContext:
    return {
        "dataset": dataset,
        "version": version,
        "region": region.name,
        "jurisdiction": region.jurisdiction,
    }


def _encode(data_key: DataKey, context: EncryptionContext) -> bytes:
    fields = dict(context) | {
        "format": _FORMAT,
        "wrapped_key": base64.b64encode(data_key.wrapped).decode(),
    }
    mac_key = _derive(data_key.plaintext, _MAC_INFO)
    mac = hmac.new(mac_key, canonical_json(fields), hashlib.sha256).hexdigest()
    return canonical_json(fields | {"mac": mac})


def _wrapped_key(stored: bytes, context: EncryptionContext, where: str) -> bytes:
    """Take the wrapped key out of an envelope whose MAC cannot be checked before it is unwrapped.

    What the envelope says of itself is checked first, so that a misplaced one is called that.
    """
    envelope = _parse(stored, where)
    for key, value in context.items():
        if getattr(envelope, key) != value:
            raise _broken(where, f"is for {key} {getattr(envelope, key)!r} and not {value!r}")
    return base64.b64decode(envelope.wrapped_key)


def _parse(stored: bytes, where: str) -> _Envelope:
    try:
        envelope = _Envelope.model_validate_json(stored)
        base64.b64decode(envelope.wrapped_key, validate=True)
    except (ValidationError, binascii.Error):
        raise _broken(where, "is not a key envelope") from None
    if envelope.format != _FORMAT:
        raise _broken(where, f"has the format {envelope.format!r} and not {_FORMAT!r}")
    return envelope


def _check_mac(stored: bytes, data_key: DataKey, context: EncryptionContext, where: str) -> None:
    # An envelope has one encoding, so comparing the whole checks the MAC and the canonical form.
    if not hmac.compare_digest(_encode(data_key, context), stored):
        raise _broken(where, "does not authenticate")


def _explain_shredded(region: Region, store: ObjectStore, dataset: str, version: str) -> None:
    """Raise KeyShredded if the note says so."""
    try:
        note = ShredNote.model_validate_json(store.get(_note_name(version)))
    except (ObjectMissing, ValidationError):
        return
    raise KeyShredded(
        f"version {version[:12]} of dataset {dataset!r} was shredded in region {region.name} by "
        f"{note.actor} on {note.time}: its data key is destroyed and its shards there can not be "
        "read any more. `convoy stage upload` makes a new key and places all shards again"
    )


def _note_name(version: str) -> str:
    return f"{_SHREDDED}/{version}.json"


def _where(region: Region, version: str) -> str:
    return f"{envelope_name(version)} in regions.{region.name}.store ({region.store})"


def _derive(data_key: bytes, info: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, info).derive(data_key)


def _broken(where: str, what: str) -> SealBroken:
    return SealBroken(
        f"the key envelope {where} {what}: it was changed or belongs elsewhere; restore it, or "
        "remove it and upload the dataset version again"
    )
