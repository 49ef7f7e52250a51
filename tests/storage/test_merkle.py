"""Merkle trees: RFC 6962's own vectors, and pymerkle, which is an implementation of others."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymerkle import InmemoryTree, verify_consistency

from storage.merkle import (
    Frontier,
    hash_leaf,
    is_consistent,
    prove_consistency,
    prove_inclusion,
    root_from_inclusion,
    root_of,
)

# The entries and roots that implementations of Certificate Transparency (RFC 6962) test with.
ENTRIES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
LEAVES = [hash_leaf(entry) for entry in ENTRIES]

leaf_lists = st.lists(st.binary(max_size=9).map(hash_leaf), min_size=1, max_size=70)


def test_the_vectors_of_rfc_6962() -> None:
    assert root_of([]) == hashlib.sha256(b"").digest()
    frontier = Frontier()
    for number, root in enumerate(ROOTS):
        frontier = frontier.extend([LEAVES[number]])
        assert frontier.root.hex() == root
    assert [digest.hex()[:8] for digest in prove_inclusion(LEAVES, 5)] == [
        "bc1a0643",
        "ca854ea1",
        "d37ee418",
    ]
    assert [digest.hex()[:8] for digest in prove_consistency(LEAVES, 6)] == [
        "0ebc5d34",
        "ca854ea1",
        "d37ee418",
    ]


@given(st.integers(1, 130), st.data())
@settings(deadline=None, max_examples=60)
def test_pymerkle_gives_the_same_roots_and_proofs(size: int, data: st.DataObject) -> None:
    entries = [bytes([i, i % 7]) for i in range(size)]
    leaves = [hash_leaf(entry) for entry in entries]
    tree = InmemoryTree(algorithm="sha256")
    tree.append_entries(entries)
    index, old_size = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    assert root_of(leaves) == tree.get_root()
    assert root_of(leaves[:old_size]) == tree.get_root(old_size)
    # pymerkle counts from 1 and puts the leaf itself before the path.
    assert [leaves[index], *prove_inclusion(leaves, index)] == tree.prove_inclusion(index + 1).path
    # Its consistency proofs have another layout; they and ours prove the same two roots.
    old_root = root_of(leaves[:old_size])
    verify_consistency(old_root, root_of(leaves), tree.prove_consistency(old_size, size))
    ours = prove_consistency(leaves, old_size)
    assert is_consistent(old_size, old_root, size, root_of(leaves), ours)


@given(leaf_lists, st.data())
@settings(deadline=None)
def test_a_frontier_grows_in_any_steps_to_the_same_tree(
    leaves: list[bytes], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(leaves)))
    assert Frontier().extend(leaves[:cut]).extend(leaves[cut:]) == Frontier().extend(leaves)


@given(leaf_lists, st.data())
@settings(deadline=None)
def test_a_proof_proves_its_leaf_and_no_other(leaves: list[bytes], data: st.DataObject) -> None:
    size, root = len(leaves), root_of(leaves)
    index = data.draw(st.integers(0, size - 1))
    path = prove_inclusion(leaves, index)
    assert root_from_inclusion(leaves[index], index, size, path) == root
    other = data.draw(st.integers(0, size - 1))
    if leaves[other] != leaves[index]:
        assert root_from_inclusion(leaves[other], index, size, path) != root
    assert root_from_inclusion(leaves[index], index, size, [*path, root]) is None
    assert root_from_inclusion(leaves[index], size, size, path) is None
    if path:
        assert root_from_inclusion(leaves[index], index, size, path[:-1]) is None
        broken = bytes([path[0][0] ^ 1]) + path[0][1:]
        assert root_from_inclusion(leaves[index], index, size, [broken, *path[1:]]) != root


@given(leaf_lists, st.data())
@settings(deadline=None)
def test_a_tree_extends_what_it_began_with_and_nothing_else(
    leaves: list[bytes], data: st.DataObject
) -> None:
    size, root = len(leaves), root_of(leaves)
    old_size = data.draw(st.integers(1, size))
    old_root = root_of(leaves[:old_size])
    path = prove_consistency(leaves, old_size)
    assert is_consistent(old_size, old_root, size, root, path)
    assert not is_consistent(old_size, hash_leaf(b"x"), size, root, path)
    assert not is_consistent(old_size, old_root, size, hash_leaf(b"x"), path)
    assert not is_consistent(old_size, old_root, size, root, [*path, root])
    assert not is_consistent(0, old_root, size, root, path)
    if path:
        assert not is_consistent(old_size, old_root, size, root, path[:-1])
        assert not is_consistent(old_size, old_root, size, root, [])


def test_what_is_not_there_cannot_be_proven() -> None:
    for call in (
        lambda: prove_inclusion(LEAVES, 8),
        lambda: prove_inclusion(LEAVES, -1),
        lambda: prove_consistency(LEAVES, 9),
        lambda: prove_consistency(LEAVES, 0),
        lambda: Frontier(3, (LEAVES[0],)),
    ):
        with pytest.raises(ValueError, match=r"there is no|has no"):
            call()
