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
name, _, encoded = sys.argv[2].split("+", 2)

# The checkpoint: a signed note (c2sp.org/signed-note) of three lines.
public = base64.b64decode(encoded)
text, _, signature_line = proof["checkpoint"].rpartition("\n\n")
text += "\n"
dash, signer, encoded = signature_line.removesuffix("\n").split(" ")
signature = base64.b64decode(encoded)
key_id = hashlib.sha256(name.encode() + b"\n" + public).digest()[:4]
if (dash, signer, signature[:4], public[:1]) != ("\u2014", name, key_id, b"\x01"):
    sys.exit("the checkpoint is not signed by this key")
Ed25519PublicKey.from_public_bytes(public[1:]).verify(signature[4:], text.encode())  # raises
origin, size, root = text.splitlines()

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
