"""The hand-over of an access log from one signing key to the next, signed by both.

It is a signed note in the log's second place. docs/access-log.md specifies it.
"""

from dataclasses import dataclass

from storage.errors import SealBroken
from storage.signed_note import SigningKey, VerifierKey, open_note

_WORD = "convoy-key-handover/1"


@dataclass(frozen=True)
class Handover:
    """From that many entries on the new key signs, and the old one no more."""

    size: int
    old: VerifierKey
    new: VerifierKey

    @property
    def text(self) -> str:
        return f"{self.old.name}\n{_WORD}\n{self.size}\n{self.old}\n{self.new}\n"


def sign_handover(size: int, old: SigningKey, new: SigningKey) -> bytes:
    """The note, with a signature of each key."""
    text = Handover(size, old.verifier, new.verifier).text
    return old.sign(text) + new.sign(text).removeprefix(f"{text}\n".encode())


def open_handover(note: bytes) -> Handover:
    """Read a note that both keys in it signed; whether one of them is to be trusted is another
    question. Raises SealBroken."""
    head = note.decode("utf-8", "replace").partition("\n\n")[0].split("\n")
    try:
        name, _, size, old, new = head
        handover = Handover(int(size), VerifierKey.parse(old), VerifierKey.parse(new))
    except ValueError:
        raise SealBroken("it is no hand-over of a key") from None
    keys = (handover.old, handover.new)
    # Its one form alone is taken; a log keeps its name.
    if any(open_note(note, key) != handover.text or key.name != name for key in keys):
        raise SealBroken("it is no hand-over of this log's key")
    return handover
