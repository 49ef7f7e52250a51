"""A checkpoint of an access log: its size and root, as a signed note after
https://c2sp.org/tlog-checkpoint.
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, PositiveInt, field_validator

from storage.errors import SealBroken
from storage.locations import FileLocation, MemoryLocation, parse_store
from storage.merkle import HASH_BYTES
from storage.signed_note import VerifierKey, open_note

_TEXT = re.compile(r"(?P<origin>[^\n]+)\n(?P<size>0|[1-9][0-9]{0,18})\n(?P<root>[A-Za-z0-9+/=]+)\n")


class AuditConfig(BaseModel, frozen=True, extra="forbid"):
    """How the access log is signed, and where its checkpoints are copied."""

    signing_key: Path = Path(".convoy/keys/audit.key")
    """The file of the Ed25519 key, mode 0600, made by the first checkpoint."""
    witness: str = "file:.convoy/witness"
    """URL of the store that gets every checkpoint; logs may share it. It proves something only
    where those who can change the log cannot change it."""
    region: str | None = None
    """The region that the witness is in: the policy is asked whether it may have a `log`. Needed
    where it is not on this machine."""
    checkpoint_entries: PositiveInt = 10_000
    """A checkpoint is made at the end of a stage, and within it after so many entries."""

    @field_validator("witness")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parse_store(url)
        return url

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the witness is a folder, or memory."""
        return isinstance(parse_store(self.witness), FileLocation | MemoryLocation)


@dataclass(frozen=True)
class Checkpoint:
    """What a log was at one moment."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def open_checkpoint(note: bytes, key: VerifierKey) -> Checkpoint:
    """Check a note's signature and read it. Raises SealBroken."""
    matched = _TEXT.fullmatch(open_note(note, key))
    root = base64.b64decode(matched["root"]) if matched else b""
    if matched is None or len(root) != HASH_BYTES or matched["origin"] != key.name:
        raise SealBroken("it is no checkpoint of this log")
    return Checkpoint(matched["origin"], int(matched["size"]), root)
