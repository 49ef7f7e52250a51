"""Random damage to an access log and its checkpoints: every case must be refused, none may crash.

`count_refusals(directory, num_cases, seed)` makes a small log, and for each case changes a copy.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from storage.access_log import AccessEntry, AccessLog
from storage.log_checkpoint import AuditConfig
from storage.log_verification import Verification, verify_log
from storage.notary import Notary
from storage.signed_note import VerifierKey
from storage.witness import Witness

LOG = "access/log.jsonl"


@dataclass(frozen=True)
class Audited:
    """A log in a folder, with its key and its second place."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def config(self) -> AuditConfig:
        return AuditConfig(
            signing_key=self.folder / "audit.key", witness=f"file:{self.folder}/witness"
        )

    @property
    def key(self) -> VerifierKey:
        [key] = Witness(self.config.witness).logs()
        return key

    def write(self, num_entries: int, *, close: bool = True, publish: bool = True) -> None:
        log = AccessLog(self.log)
        for number in range(num_entries):
            log.append(entry(number))
        if close:
            log.close()
        log.flush()
        if publish:
            Notary(self.log, self.config).publish()

    def verify(self, key: VerifierKey) -> Verification:
        witness = Witness(self.config.witness)
        return verify_log(self.log, witness.checkpoints(key), key, witness.handovers(key))

    def rotate(self) -> VerifierKey:
        return Notary(self.log, self.config).rotate()


def entry(number: int, **changes: object) -> AccessEntry:
    fields: dict[str, object] = {
        "region": "eu",
        "action": "get",
        "object": f"objects/{number:064x}",
        "artifact": "shard",
        "num_bytes": number,
        "decision": "allowed",
        "reason": "residency",
    }
    return AccessEntry.model_validate(fields | changes)


def make_log(folder: Path) -> Audited:
    """Three checkpoints over 34 entries, and two entries after the last."""
    audited = Audited(folder)
    audited.write(9)
    audited.write(7)
    audited.write(8)
    audited.write(2, publish=False)
    return audited


def count_refusals(directory: Path, num_cases: int, seed: int) -> int:
    """The number of cases that were refused; `directory` is made and used."""
    whole = make_log(directory / "whole")
    key = whole.key
    whole.rotate()
    whole.write(3)
    whole.write(2, publish=False)
    assert whole.verify(key).is_whole
    files = sorted(path for path in whole.folder.rglob("*") if path.is_file())
    files = [path for path in files if path.name not in ("audit.key", "key")]
    contents = {path.relative_to(whole.folder): path.read_bytes() for path in files}
    copy = Audited(directory / "copy")
    shutil.copytree(whole.folder, copy.folder)
    rng = random.Random(seed)
    num_refused = 0
    for _ in range(num_cases):
        name, changed = _damage(rng, contents)
        (copy.folder / name).write_bytes(changed)
        num_refused += not copy.verify(key).is_whole
        (copy.folder / name).write_bytes(contents[name])
    assert copy.verify(key).is_whole
    return num_refused


def _damage(rng: random.Random, contents: dict[Path, bytes]) -> tuple[Path, bytes]:
    """A file and other bytes for it, by one kind of damage."""
    kinds = [_flip, _cut, _swap, _insert, _replay, _exchange]
    while True:
        # The log itself is most of what there is to protect.
        name = Path(LOG) if rng.random() < 0.5 else rng.choice(sorted(contents))
        others = [content for other, content in contents.items() if other != name]
        before = contents[name]
        after = rng.choice(kinds)(rng, before, rng.choice(others))
        # Hashes after the last entry are what a killed writer leaves, and no damage.
        is_leftover = name.suffix == ".hashes" and after.startswith(before)
        if after != before and not is_leftover:
            return name, after


def _flip(rng: random.Random, content: bytes, other: bytes) -> bytes:
    broken = bytearray(content)
    broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
    return bytes(broken)


def _cut(rng: random.Random, content: bytes, other: bytes) -> bytes:
    start = rng.randrange(len(content))
    end = rng.choice([len(content), rng.randint(start + 1, len(content))])
    return content[:start] + content[end:]


def _in_lines(
    change: Callable[[random.Random, list[bytes]], None],
) -> Callable[[random.Random, bytes, bytes], bytes]:
    def damage(rng: random.Random, content: bytes, other: bytes) -> bytes:
        lines = content.splitlines(keepends=True)
        change(rng, lines)
        return b"".join(lines)

    return damage


@_in_lines
def _swap(rng: random.Random, lines: list[bytes]) -> None:
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one], lines[two] = lines[two], lines[one]


@_in_lines
def _replay(rng: random.Random, lines: list[bytes]) -> None:
    lines.insert(rng.randint(0, len(lines)), rng.choice(lines))


def _insert(rng: random.Random, content: bytes, other: bytes) -> bytes:
    at = rng.randint(0, len(content))
    return content[:at] + rng.randbytes(rng.randint(1, 40)) + content[at:]


def _exchange(rng: random.Random, content: bytes, other: bytes) -> bytes:
    return other
