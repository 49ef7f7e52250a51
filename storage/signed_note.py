"""Signed notes (https://c2sp.org/signed-note): text with Ed25519 signatures after it.

A verifier key is NAME+HASH+KEY as in Go's golang.org/x/mod/sumdb/note: HASH is the key's id in
hex, KEY the base64 of the byte 1 and the 32 bytes of the public key. A signing key is
PRIVATE+KEY+NAME+HASH+KEY with the 32 bytes of the private key in their place.
"""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass, field

from storage.errors import SealBroken

_ED25519 = b"\x01"
_NAME = re.compile(r"[^\s+]+")
_DASH = "\N{EM DASH}"
_MOST_BYTES = 64 << 10


@dataclass(frozen=True)
class VerifierKey:
    """The public half of a key: enough to check what it signed."""

    name: str
    public_key: bytes

    @classmethod
    def parse(cls, text: str) -> "VerifierKey":
        """Read NAME+HASH+KEY. Raises ValueError."""
        name, key_id, encoded = _split_key(text, 3)
        key = cls(name, encoded)
        if key_id != key.key_id.hex():
            raise ValueError("the verifier key's hash is not that of its key")
        return key

    @property
    def key_id(self) -> bytes:
        material = self.name.encode() + b"\n" + _ED25519 + self.public_key
        return hashlib.sha256(material).digest()[:4]

    def __str__(self) -> str:
        encoded = base64.b64encode(_ED25519 + self.public_key).decode()
        return f"{self.name}+{self.key_id.hex()}+{encoded}"


@dataclass(frozen=True)
class SigningKey:
    """A named Ed25519 private key."""

    name: str
    seed: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "SigningKey":
        """Read PRIVATE+KEY+NAME+HASH+KEY. Raises ValueError, which repeats none of it."""
        prefix, word, rest = (*text.split("+", 2), "", "")[:3]
        if (prefix, word) != ("PRIVATE", "KEY"):
            raise ValueError("it is no signing key")
        name, key_id, seed = _split_key(rest, 3)
        key = cls(name, seed)
        if key_id != key.verifier.key_id.hex():
            raise ValueError("its hash is not that of its key")
        return key

    @property
    def verifier(self) -> VerifierKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        public = Ed25519PrivateKey.from_private_bytes(self.seed).public_key()
        return VerifierKey(self.name, public.public_bytes_raw())

    def encode(self) -> str:
        encoded = base64.b64encode(_ED25519 + self.seed).decode()
        return f"PRIVATE+KEY+{self.name}+{self.verifier.key_id.hex()}+{encoded}"

    def sign(self, text: str) -> bytes:
        """The note of a text, which ends with a newline. The same text gives the same note."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if not text.endswith("\n"):
            raise ValueError("the text of a note ends with a newline")
        signature = Ed25519PrivateKey.from_private_bytes(self.seed).sign(text.encode())
        encoded = base64.b64encode(self.verifier.key_id + signature).decode()
        return f"{text}\n{_DASH} {self.name} {encoded}\n".encode()


def open_note(note: bytes, key: VerifierKey) -> str:
    """The text of a note that the key signed; signatures of other keys are passed over.

    Raises SealBroken if it is no note, or none that this key signed.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        whole = note.decode()
    except UnicodeDecodeError:
        raise SealBroken("it is no signed note") from None
    text, found, signatures = whole.rpartition("\n\n")
    text += "\n"
    if not found or len(note) > _MOST_BYTES or not signatures.endswith("\n"):
        raise SealBroken("it is no signed note")
    public_key = Ed25519PublicKey.from_public_bytes(key.public_key)
    is_signed = False
    for line in signatures.removesuffix("\n").split("\n"):
        dash, name, encoded = (*line.split(" ", 2), "", "")[:3]
        signature = _decode(encoded)
        if dash != _DASH or not _NAME.fullmatch(name) or signature is None or len(signature) < 5:
            raise SealBroken("it is no signed note")
        if name == key.name and signature[:4] == key.key_id:
            try:
                public_key.verify(signature[4:], text.encode())
            except InvalidSignature:
                raise SealBroken(f"the signature of {key.name} is not of this text") from None
            if is_signed:
                raise SealBroken(f"{key.name} signed it twice")
            is_signed = True
    if not is_signed:
        raise SealBroken(f"it bears no signature of {key.name} ({key.key_id.hex()})")
    return text


def _split_key(text: str, num_parts: int) -> tuple[str, str, bytes]:
    name, key_id, encoded = (*text.split("+", 2), "", "")[:num_parts]
    key = _decode(encoded)
    if not _NAME.fullmatch(name) or key is None or len(key) != 33 or key[:1] != _ED25519:
        raise ValueError("it is no Ed25519 key of the form NAME+HASH+KEY")
    return name, key_id, key[1:]


def _decode(encoded: str) -> bytes | None:
    """Base64 in its one canonical form; other forms of the same bytes are not taken."""
    try:
        decoded = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
    return decoded if base64.b64encode(decoded).decode() == encoded else None
