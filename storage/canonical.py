"""Canonical JSON after RFC 8785: the same value has the same bytes, everywhere."""

from collections.abc import Mapping

import rfc8785


def canonical_json(value: Mapping[str, str | int]) -> bytes:
    """Encode an object of strings and whole numbers. Raises ValueError for other values."""
    return rfc8785.dumps(dict(value))
