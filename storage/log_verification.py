"""Whether an access log is what it was: every entry against every checkpoint that lies outside.

The newest outside checkpoint vouches for all entries before it. The leaf hashes that lie beside
the log are not proof by themselves; where they fit a checkpoint they show which entry it is.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ValidationError

from storage.access_log import AccessEntry, encode_entry
from storage.errors import SealBroken, StorageError
from storage.key_history import KeyHistory, trace_keys
from storage.log_checkpoint import Checkpoint
from storage.log_file import LogFile
from storage.merkle import HASH_BYTES, Frontier, hash_leaf, root_of
from storage.signed_note import VerifierKey

_MOST_NAMED = 20


class Finding(BaseModel, frozen=True):
    """Something that is not as it should be."""

    entry: int | None
    """The first entry concerned, from 0, if it can be told."""
    what: str


class SilentWriter(BaseModel, frozen=True):
    """A process that did not say that it ended: it runs still, or was killed. What it had done
    since its last entry, within a flush, is not in the log."""

    writer: str
    host: str
    last_entry: int
    """The number of its last entry in the log."""
    what: str


class Verification(BaseModel, frozen=True):
    """What was found."""

    num_entries: int
    num_proven: int
    """Entries that the newest outside checkpoint vouches for."""
    num_checkpoints: int
    """Checkpoints in the second place."""
    key: str
    """The verifier key; compare it with the one that you were given."""
    findings: tuple[Finding, ...]
    silent_writers: tuple[SilentWriter, ...]

    @property
    def is_whole(self) -> bool:
        return not self.findings


@dataclass
class _Reading:
    """What one pass over the entries gives."""

    leaves: list[bytes] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    next_sequence: dict[str, int] = field(default_factory=dict)
    last: dict[str, tuple[int, AccessEntry]] = field(default_factory=dict)


def verify_log(
    path: Path,
    outside: Sequence[tuple[str, bytes]],
    key: VerifierKey | None,
    handovers: Iterable[tuple[str, bytes]] = (),
) -> Verification:
    """Check every entry and every checkpoint of a log. Changes nothing.

    outside: names and notes of the checkpoints in the second place. key: what they are checked
    with, and the keys before and after it by the notes of `handovers`; None if there is none yet.
    Raises StorageError if a file cannot be read.
    """
    file = LogFile(path)
    reading = _read(file)
    history, wrong = trace_keys(handovers, key) if key else (KeyHistory(()), [])
    checkpoints, findings = _open_all(outside, history)
    findings += [Finding(entry=None, what=f"hand-over {name}: {what}") for name, what in wrong]
    local = path.with_suffix(".checkpoint")
    if local.exists():
        inside, more = _open_all([(local.name, _read_whole(local))], history)
        findings += more
        if inside and inside[0] not in checkpoints:
            what = f"the checkpoint of {inside[0].size} entries is not in the second place"
            findings.append(Finding(entry=None, what=what))
        elif inside and inside[0].size < max(checkpoint.size for checkpoint in checkpoints):
            what = f"{local.name} is older than the newest checkpoint in the second place"
            findings.append(Finding(entry=None, what=what))
        checkpoints += inside
    hashes = _read_hashes(file)
    checkpoints.sort(key=lambda checkpoint: checkpoint.size)
    findings += _compare(checkpoints, reading.leaves, hashes)
    findings += reading.findings
    findings += _check_end(file, reading.leaves, hashes, checkpoints)
    findings.sort(key=lambda finding: (finding.entry is None, finding.entry or 0))
    return Verification(
        num_entries=len(reading.leaves),
        num_proven=0 if findings else max((c.size for c in checkpoints), default=0),
        num_checkpoints=len(outside),
        key=str(key or ""),
        findings=tuple(findings[:_MOST_NAMED]),
        silent_writers=tuple(_silent(reading)),
    )


def read_lines(path: Path) -> list[bytes]:
    """The entries as their lines, without what a killed writer left half. Raises StorageError."""
    return _read_whole(path).split(b"\n")[:-1]


def _read_whole(path: Path) -> bytes:
    """What a file of the log holds; nothing if there is none. Raises StorageError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise LogFile(path).unusable("read", error) from error


def _read(file: LogFile) -> _Reading:
    reading = _Reading()
    for number, line in enumerate(read_lines(file.path)):
        reading.leaves.append(hash_leaf(line))
        try:
            entry = AccessEntry.model_validate_json(line)
            is_canonical = encode_entry(json.loads(line)) == line
        except (ValidationError, ValueError):
            is_canonical = False
        if not is_canonical:
            reading.findings.append(Finding(entry=number, what="it is no entry in canonical form"))
            continue
        expected = reading.next_sequence.get(entry.writer, 0)
        if entry.sequence != expected or (entry.action == "open") != (entry.sequence == 0):
            what = f"it is number {entry.sequence} of its writer, where {expected} comes next"
            reading.findings.append(Finding(entry=number, what=what))
        elif entry.writer in reading.last and reading.last[entry.writer][1].action == "close":
            reading.findings.append(Finding(entry=number, what="its writer had ended before"))
        reading.next_sequence[entry.writer] = entry.sequence + 1
        reading.last[entry.writer] = (number, entry)
    return reading


def _open_all(
    notes: Iterable[tuple[str, bytes]], history: KeyHistory
) -> tuple[list[Checkpoint], list[Finding]]:
    checkpoints: list[Checkpoint] = []
    findings: list[Finding] = []
    for name, note in notes:
        try:
            checkpoint = history.open_checkpoint(note)
            if name.rpartition("/")[2].isdecimal() and int(name.rpartition("/")[2]) != (
                checkpoint.size
            ):
                raise SealBroken(f"it is that of {checkpoint.size} entries")
            checkpoints.append(checkpoint)
        except SealBroken as error:
            findings.append(Finding(entry=None, what=f"checkpoint {name}: {error}"))
    return checkpoints, findings


def _read_hashes(file: LogFile) -> list[bytes]:
    content = _read_whole(file.hashes_path)
    whole = len(content) - len(content) % HASH_BYTES
    return [content[i : i + HASH_BYTES] for i in range(0, whole, HASH_BYTES)]


def _compare(
    checkpoints: Sequence[Checkpoint], leaves: Sequence[bytes], hashes: Sequence[bytes]
) -> Iterator[Finding]:
    """The first checkpoint that the entries do not fit, with the entry that is to blame."""
    roots = _roots(leaves, [c.size for c in checkpoints])
    sound = 0
    for checkpoint in checkpoints:
        root = roots.get(checkpoint.size)
        if root == checkpoint.root:
            sound = checkpoint.size
            continue
        until = checkpoint.size - 1
        says = f"the checkpoint of {checkpoint.size} entries"
        known = hashes[: checkpoint.size]
        if len(known) == checkpoint.size and root_of(known) == checkpoint.root:
            first = _first_difference(leaves, known)
            yield Finding(entry=first, what=f"{_describe(leaves, known, first)}: {says} proves it")
        elif root is None:
            what = f"entries {len(leaves)} to {until} are missing: {says} proves it"
            yield Finding(entry=len(leaves), what=what)
        else:
            what = f"one or more of the entries {sound} to {until} are not those of {says}"
            yield Finding(entry=sound, what=what)
        return


def _roots(leaves: Sequence[bytes], sizes: Sequence[int]) -> dict[int, bytes]:
    """Roots of the trees of the first entries, of those sizes that there are."""
    roots: dict[int, bytes] = {}
    frontier = Frontier()
    for size in sorted(set(sizes)):
        if size <= len(leaves):
            frontier = frontier.extend(leaves[frontier.size : size])
            roots[size] = frontier.root
    return roots


def _first_difference(leaves: Sequence[bytes], hashes: Sequence[bytes]) -> int:
    for number, (leaf, known) in enumerate(zip(leaves, hashes, strict=False)):
        if leaf != known:
            return number
    return min(len(leaves), len(hashes))


def _describe(leaves: Sequence[bytes], hashes: Sequence[bytes], first: int) -> str:
    if first >= len(leaves):
        return f"it and all after it are missing, {len(hashes) - first} entries"
    if leaves[first] in hashes[first + 1 :]:
        return "it was removed or moved"
    if first + 1 < len(leaves) and leaves[first + 1] == hashes[first]:
        return "it was inserted"
    return "it was changed"


def _check_end(
    file: LogFile,
    leaves: Sequence[bytes],
    hashes: Sequence[bytes],
    checkpoints: Sequence[Checkpoint],
) -> Iterator[Finding]:
    """Entries after the newest checkpoint have no other witness than the files beside them."""
    if not file.path.exists() and not file.tree_path.exists():
        return
    try:
        end = file.read_end()
    except StorageError as error:
        yield Finding(entry=None, what=str(error))
        return
    size = end.frontier.size
    first = _first_difference(leaves, hashes[:size])
    if first < size:
        roots = _roots(leaves, [c.size for c in checkpoints])
        is_proven = any(c.size > first and roots.get(c.size) == c.root for c in checkpoints)
        what = f"{_describe(leaves, hashes[:size], first)}, by {file.hashes_path.name}"
        if is_proven:
            what = f"{file.hashes_path.name} was changed; a checkpoint proves the entry itself"
        yield Finding(entry=first, what=what)
    elif root_of(leaves[:size]) != end.frontier.root:
        yield Finding(entry=None, what=f"{file.tree_path.name} is the tree of other entries")


def _silent(reading: _Reading) -> Iterator[SilentWriter]:
    for writer, (number, entry) in reading.last.items():
        if entry.action != "close":
            yield SilentWriter(
                writer=writer,
                host=entry.host,
                last_entry=number,
                what=f"ended without saying so after entry {number}, or runs still",
            )
