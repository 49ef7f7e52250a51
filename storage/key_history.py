"""The keys that signed an access log, one after another, from the one that an auditor has."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from storage.errors import SealBroken
from storage.key_handover import Handover, open_handover
from storage.log_checkpoint import Checkpoint, open_checkpoint
from storage.signed_note import VerifierKey


@dataclass(frozen=True)
class KeyHistory:
    """The keys of one log, oldest first, and the sizes at which one gave way to the next."""

    keys: tuple[VerifierKey, ...]
    sizes: tuple[int, ...] = ()

    def open_checkpoint(self, note: bytes) -> Checkpoint:
        """Read a checkpoint that the key of its time signed. Raises SealBroken."""
        refused = SealBroken("there is no key to check it with")
        for key, since, until in zip(self.keys, (0, *self.sizes), (*self.sizes, None), strict=True):
            try:
                checkpoint = open_checkpoint(note, key)
            except SealBroken as error:
                refused = error
                continue
            if checkpoint.size < since or (until is not None and checkpoint.size > until):
                raise SealBroken(
                    f"it is of {checkpoint.size} entries, and its key {key.key_id.hex()} signs "
                    f"from {since} to {'now' if until is None else until}"
                )
            return checkpoint
        raise refused


def trace_keys(
    notes: Iterable[tuple[str, bytes]], key: VerifierKey
) -> tuple[KeyHistory, list[tuple[str, str]]]:
    """The keys before and after `key`, by the hand-overs that each of them signed.

    Gives with them the names of the notes that lead nowhere, each with what is wrong with it.
    """
    handovers: list[tuple[str, Handover]] = []
    wrong: list[tuple[str, str]] = []
    for name, note in notes:
        try:
            handovers.append((name, open_handover(note)))
        except SealBroken as error:
            wrong.append((name, str(error)))
    keys, sizes = [key], list[int]()
    while found := _take(handovers, lambda handover: handover.old == keys[-1]):
        keys.append(found.new)
        sizes.append(found.size)
    while found := _take(handovers, lambda handover: handover.new == keys[0]):
        keys.insert(0, found.old)
        sizes.insert(0, found.size)
    wrong += [(name, "no key of this log signed it alone") for name, _ in handovers]
    if sizes != sorted(sizes):
        wrong.append(("hand-overs", "they are not in the order of their sizes"))
    return KeyHistory(tuple(keys), tuple(sizes)), wrong


def _take(
    handovers: list[tuple[str, Handover]], is_next: Callable[[Handover], bool]
) -> Handover | None:
    """The one that comes next; None where there is none, or a choice."""
    found = [pair for pair in handovers if is_next(pair[1])]
    if len(found) != 1:
        return None
    handovers.remove(found[0])
    return found[0][1]
