"""Signed notes: the example of the specification, and what is refused."""

import re

import pytest

from storage.errors import SealBroken
from storage.signed_note import SigningKey, VerifierKey, open_note

# From the documentation of golang.org/x/mod/sumdb/note, the first implementation.
PETER = VerifierKey.parse("PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")
NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpR"
    "Zb6KE6RyyBwJnAM=\n"
).encode()
KEY = SigningKey("convoy/test", bytes(range(32)))


def test_a_note_of_another_implementation_opens() -> None:
    assert open_note(NOTE, PETER).startswith("If you think cryptography")
    assert str(PETER).startswith("PeterNeumann+c74f20a3+")


def test_what_a_key_signs_it_opens_and_keys_come_back() -> None:
    note = KEY.sign("one\n\ntwo\n")
    assert open_note(note, KEY.verifier) == "one\n\ntwo\n"
    assert KEY.sign("one\n\ntwo\n") == note
    assert VerifierKey.parse(str(KEY.verifier)) == KEY.verifier
    assert SigningKey.parse(KEY.encode()) == KEY
    assert "seed" not in repr(KEY)


def test_signatures_of_others_are_passed_over() -> None:
    other = SigningKey("witness.example", bytes(32))
    signed = KEY.sign("text\n") + other.sign("text\n").rpartition(b"\n\n")[2]
    assert open_note(signed, KEY.verifier) == open_note(signed, other.verifier) == "text\n"


def test_every_other_form_is_refused() -> None:
    note = KEY.sign("text\n")
    for position in range(8 * len(note)):
        flipped = bytearray(note)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(SealBroken):
            open_note(bytes(flipped), KEY.verifier)
    for cut in range(len(note)):
        with pytest.raises(SealBroken):
            open_note(note[:cut], KEY.verifier)
    for broken in (note + b"\n", note.replace(b" ", b"  "), note + b"x", b"\n" + note, b""):
        with pytest.raises(SealBroken):
            open_note(broken, KEY.verifier)
    with pytest.raises(SealBroken, match=re.escape("no signature of convoy/test")):
        open_note(SigningKey("convoy/test", bytes(32)).sign("text\n"), KEY.verifier)


@pytest.mark.parametrize(
    "text",
    ["", "a+b", "convoy/test+00000000+AQ==", f"{PETER}"[:-2], f"x{PETER}", f"{PETER}\n"],
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="key"):
        VerifierKey.parse(text)
    with pytest.raises(ValueError, match="key"):
        SigningKey.parse("PRIVATE+KEY+" + text)
    with pytest.raises(ValueError, match="no signing key"):
        SigningKey.parse(text)
