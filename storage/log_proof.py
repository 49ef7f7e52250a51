"""Proofs about an access log that need neither the log nor Convoy: docs/verify_entry.py."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from storage.errors import SealBroken, StorageError
from storage.key_history import KeyHistory, trace_keys
from storage.log_checkpoint import Checkpoint
from storage.log_verification import read_lines
from storage.merkle import hash_leaf, prove_consistency, prove_inclusion, root_of
from storage.signed_note import VerifierKey

Notes = Sequence[tuple[str, bytes]]
"""Names and notes, as the second place gives them."""


class InclusionProof(BaseModel, frozen=True, extra="forbid"):
    """That an entry is in the log at its index (RFC 6962, section 2.1.1)."""

    format: Literal["convoy-inclusion-proof/1"] = "convoy-inclusion-proof/1"
    index: int
    """From 0."""
    entry: str
    """The line, whose bytes are hashed."""
    path: tuple[str, ...]
    """Base64 of the sibling hashes, from the leaf up."""
    checkpoint: str
    """The signed note."""
    handovers: tuple[str, ...] = ()
    """The notes by which one key gave way to the next, from the first key on."""


class ConsistencyProof(BaseModel, frozen=True, extra="forbid"):
    """That the log of one checkpoint begins with that of an older one (section 2.1.2)."""

    format: Literal["convoy-consistency-proof/1"] = "convoy-consistency-proof/1"
    path: tuple[str, ...]
    """Base64 of the hashes."""
    old_checkpoint: str
    checkpoint: str
    handovers: tuple[str, ...] = ()


def prove_entry(
    path: Path,
    index: int,
    outside: Notes,
    key: VerifierKey,
    handovers: Notes = (),
) -> InclusionProof:
    """Prove an entry by the newest outside checkpoint. Raises StorageError."""
    history, _ = trace_keys(handovers, key)
    checkpoint, note = _newest(outside, history)
    lines = read_lines(path)
    if not 0 <= index < len(lines):
        raise StorageError(f"there is no entry {index}: the log {path} has {len(lines)}, from 0")
    if index >= checkpoint.size:
        raise StorageError(
            f"entry {index} is newer than the newest checkpoint, of {checkpoint.size} entries: "
            "run `convoy audit checkpoint`"
        )
    leaves = _checked_leaves(lines, checkpoint, path)
    return InclusionProof(
        index=index,
        entry=lines[index].decode(),
        path=_encode(prove_inclusion(leaves, index)),
        checkpoint=note.decode(),
        handovers=tuple(note.decode() for _, note in handovers),
    )


def prove_extension(
    path: Path,
    old_size: int,
    outside: Notes,
    key: VerifierKey,
    handovers: Notes = (),
) -> ConsistencyProof:
    """Prove that the newest outside checkpoint extends the one of `old_size` entries.

    Raises StorageError.
    """
    history, _ = trace_keys(handovers, key)
    checkpoint, note = _newest(outside, history)
    notes = {_open(note, history).size: note for _, note in outside}
    if old_size not in notes:
        known = ", ".join(map(str, sorted(notes)[-10:]))
        raise StorageError(f"no checkpoint is of {old_size} entries; the newest are of {known}")
    leaves = _checked_leaves(read_lines(path), checkpoint, path)
    if root_of(leaves[:old_size]) != _open(notes[old_size], history).root:
        raise StorageError(
            f"the access log {path} does not begin with the checkpoint of {old_size} entries: "
            "`convoy audit verify` says more"
        )
    return ConsistencyProof(
        path=_encode(prove_consistency(leaves, old_size)),
        old_checkpoint=notes[old_size].decode(),
        checkpoint=note.decode(),
        handovers=tuple(note.decode() for _, note in handovers),
    )


def _newest(outside: Notes, history: KeyHistory) -> tuple[Checkpoint, bytes]:
    opened = [(_open(note, history), note) for _, note in outside]
    if not opened:
        raise StorageError(
            "audit.witness holds no checkpoint yet: run a stage, or `convoy audit checkpoint`"
        )
    return max(opened, key=lambda pair: pair[0].size)


def _open(note: bytes, history: KeyHistory) -> Checkpoint:
    try:
        return history.open_checkpoint(note)
    except SealBroken as error:
        raise StorageError(
            f"audit.witness: a checkpoint was changed ({error}): `convoy audit verify` says more"
        ) from None


def _checked_leaves(lines: Sequence[bytes], checkpoint: Checkpoint, path: Path) -> list[bytes]:
    leaves = [hash_leaf(line) for line in lines[: checkpoint.size]]
    if len(leaves) < checkpoint.size or root_of(leaves) != checkpoint.root:
        raise StorageError(
            f"the access log {path} is not what its newest checkpoint says: "
            "`convoy audit verify` says more"
        )
    return leaves


def _encode(path: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(base64.b64encode(digest).decode() for digest in path)
