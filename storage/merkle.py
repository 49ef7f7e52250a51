"""Merkle trees after RFC 6962, section 2.1: hashes, roots and proofs, on SHA-256.

A tree of n entries is known by its *frontier*, the roots of its perfect subtrees from left to
right, one for each bit of n: enough to append and to give the root, in O(log n). The proofs are
checked as RFC 9162, sections 2.1.3.2 and 2.1.4.2, says.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HASH_BYTES = 32


def hash_leaf(entry: bytes) -> bytes:
    """The hash of an entry."""
    return hashlib.sha256(b"\x00" + entry).digest()


def hash_node(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


@dataclass(frozen=True)
class Frontier:
    """A tree of `size` leaves: the roots of its perfect subtrees, the largest first."""

    size: int = 0
    roots: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.roots) != self.size.bit_count():
            raise ValueError(f"a tree of {self.size} leaves has no {len(self.roots)} subtrees")

    def extend(self, leaves: Iterable[bytes]) -> "Frontier":
        """The tree with more leaf hashes at its end."""
        size, roots = self.size, list(self.roots)
        for leaf in leaves:
            roots.append(leaf)
            size += 1
            # Each zero that the new size ends with joins two subtrees of one height.
            for _ in range((size & -size).bit_length() - 1):
                right = roots.pop()
                roots[-1] = hash_node(roots[-1], right)
        return Frontier(size, tuple(roots))

    @property
    def root(self) -> bytes:
        """The root hash; of an empty tree the hash of nothing."""
        if not self.roots:
            return hashlib.sha256().digest()
        root = self.roots[-1]
        for left in reversed(self.roots[:-1]):
            root = hash_node(left, root)
        return root


def root_of(leaves: Iterable[bytes]) -> bytes:
    """The root hash over leaf hashes."""
    return Frontier().extend(leaves).root


def prove_inclusion(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """The audit path of a leaf: sibling hashes from the leaf up (RFC 6962, 2.1.1)."""
    if not 0 <= index < len(leaves):
        raise ValueError(f"there is no leaf {index} among {len(leaves)}")
    path: list[bytes] = []
    start, end = 0, len(leaves)
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            path.append(root_of(leaves[middle:end]))
            end = middle
        else:
            path.append(root_of(leaves[start:middle]))
            start = middle
    return path[::-1]


def root_from_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes | None:
    """The root of the tree of `size` leaves that the path proves; None if it is no such path."""
    if not 0 <= index < size:
        return None
    node, last, root = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            return None
        if node & 1 or node == last:
            root = hash_node(sibling, root)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            root = hash_node(root, sibling)
        node, last = node >> 1, last >> 1
    return root if last == 0 else None


def prove_consistency(leaves: Sequence[bytes], old_size: int) -> list[bytes]:
    """The proof that the tree begins with the tree of its first `old_size` leaves (2.1.2)."""
    if not 0 < old_size <= len(leaves):
        raise ValueError(f"there is no tree of {old_size} leaves within {len(leaves)}")
    path: list[bytes] = []
    start, end, is_old_whole = 0, len(leaves), True
    while start + old_size < end:
        middle = start + _split(end - start)
        if start + old_size <= middle:
            path.append(root_of(leaves[middle:end]))
            end = middle
        else:
            path.append(root_of(leaves[start:middle]))
            old_size -= middle - start
            start, is_old_whole = middle, False
    if not is_old_whole:
        path.append(root_of(leaves[start:end]))
    return path[::-1]


def is_consistent(
    old_size: int, old_root: bytes, size: int, root: bytes, path: Sequence[bytes]
) -> bool:
    """Whether the path proves that the larger tree begins with the smaller one."""
    if not 0 < old_size <= size:
        return False
    if old_size == size:
        return not path and old_root == root
    hashes = [old_root, *path] if old_size.bit_count() == 1 else list(path)
    if not hashes:
        return False
    node, last = old_size - 1, size - 1
    while node & 1:
        node, last = node >> 1, last >> 1
    old = new = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            return False
        if node & 1 or node == last:
            old, new = hash_node(sibling, old), hash_node(sibling, new)
            while node and not node & 1:
                node, last = node >> 1, last >> 1
        else:
            new = hash_node(new, sibling)
        node, last = node >> 1, last >> 1
    return last == 0 and old == old_root and new == root


def _split(size: int) -> int:
    """The largest power of two that is smaller than the size."""
    return 1 << (size - 1).bit_length() - 1
