"""Check an inclusion proof of `convoy audit prove`: python verify_entry.py PROOF.json KEY

Needs `cryptography` and nothing of Convoy. KEY is the log's verifier key: have it from the log's
keeper beforehand, never from the proof. Prints the entry if it is proven. See access-log.md.
"""

import base64
import hashlib
import json
import sys

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

with open(sys.argv[1], encoding="utf-8") as file:
    proof = json.load(file)
key = sys.argv[2]
name = key.split("+")[0]


def signed_text(note: str) -> str:
    """The text of a note (c2sp.org/signed-note) that the key signed, or the end."""
    public = base64.b64decode(key.split("+", 2)[2])
    key_id = hashlib.sha256(name.encode() + b"\n" + public).digest()[:4]
    text, _, lines = note.rpartition("\n\n")
    for line in lines.splitlines():
        dash, signer, encoded = line.split(" ")
        signature = base64.b64decode(encoded)
        if (dash, signer, signature[:4], public[:1]) == ("\u2014", name, key_id, b"\x01"):
            verifier = Ed25519PublicKey.from_public_bytes(public[1:])
            verifier.verify(signature[4:], f"{text}\n".encode())  # raises
            return text
    sys.exit("the checkpoint is not signed by this key")


# Where the key was handed over to another, that one: the note names both, in its last two lines.
for note in proof.get("handovers", []):
    if note.split("\n")[3] == key:
        _, word, _, _, following = signed_text(note).split("\n")
        if word == "convoy-key-handover/1" and following.split("+")[0] == name:
            key = following

# The checkpoint: a note of three lines.
origin, size, root = signed_text(proof["checkpoint"]).split("\n")

# The path from the entry to the root of the tree (RFC 9162, section 2.1.3.2).
node, last = proof["index"], int(size) - 1
digest = hashlib.sha256(b"\x00" + proof["entry"].encode()).digest()
for sibling in map(base64.b64decode, proof["path"]):
    is_right = node % 2 == 1 or node == last
    pair = sibling + digest if is_right else digest + sibling
    digest = hashlib.sha256(b"\x01" + pair).digest()
    while is_right and node > 0 and node % 2 == 0:
        node, last = node >> 1, last >> 1
    node, last = node >> 1, last >> 1
if origin != name or not 0 <= node <= last == 0 or digest != base64.b64decode(root):
    sys.exit("the entry is not in the log at this index")
print(proof["entry"])
