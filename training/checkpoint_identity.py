"""How two runs differ, in words. Loads no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_SHOWN = 4
_NONE = "nothing"


def explain_difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """ " (FIELD is X here and Y there, ...)", or nothing when one of them says nothing of itself.

    Both are nested dicts of plain values, as TrainSpec.identity.
    """
    if not there or not here:
        return ""
    old, new = dict(_flatten(there)), dict(_flatten(here))
    differing = [name for name in (old | new) if old.get(name, _NONE) != new.get(name, _NONE)]
    shown = [
        f"{name} is {_short(new.get(name, _NONE))} and was {_short(old.get(name, _NONE))}"
        for name in differing[:_MOST_SHOWN]
    ]
    more = len(differing) - len(shown)
    return f" ({', '.join(shown)}{f', and {more} more' if more else ''})" if shown else ""


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    """A digest by its first digits."""
    text = str(value)
    return text[:12] if len(text) == 64 else text
