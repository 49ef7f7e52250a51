"""Which records are kept for evaluation: drawn by content, so that equal records stand together, or
by their group, so that its records do."""

import hashlib
import json
import sys
import zlib
from collections.abc import Mapping
from datetime import UTC, timedelta
from decimal import Decimal
from typing import Any

from data.shard import Split

_LONG_BYTES = 512
_MIX = 0x9E3779B97F4A7C15
_NUMBERS = frozenset({int, float})
_IS_LITTLE = sys.byteorder == "little"


def draw_split(fields: Mapping[str, Any], share: float, group: str | None = None) -> Split:
    """The side on which a record stands: a pure function of the share held out and of its group, or
    of its fields if it has none.

    Raises TypeError for a value that no shard can hold, ValueError or RecursionError for one that
    holds itself.
    """
    if not share:
        return "train"
    if group is not None:
        draw = _draw_text(group)
    elif any(map(_is_long, fields.values())):
        draw = _draw_long(fields)
    else:
        draw = _draw_text(_to_json(fields))
    return "holdout" if draw < share * 2**64 else "train"


def _draw_text(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8])


def _draw_long(fields: Mapping[str, Any]) -> int:
    """JSON of long values would cost more than to compress them. Nobody gains by a collision, so
    a checksum will do; the product spreads its 32 bits over 64."""
    checksum = 0
    for name in sorted(fields):
        checksum = zlib.crc32(_content(fields[name]), zlib.crc32(name.encode(), checksum))
    return checksum * _MIX % 2**64


def _is_long(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value) > _LONG_BYTES
    return kind not in _NUMBERS and _is_array(value) and value.nbytes > _LONG_BYTES


def _content(value: Any) -> Any:
    kind = type(value)
    if kind is str:
        return value.encode("utf-8", "surrogatepass")
    if kind is bytes:
        return value
    if kind in _NUMBERS:
        return repr(value).encode()  # as JSON has it, and quicker
    if _is_array(value) and value.dtype.kind in "biufcmM":
        if _IS_LITTLE and value.dtype.isnative and value.flags.c_contiguous:
            return value.view("u1") if value.dtype.kind in "mM" else value
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return _to_json(value).encode("utf-8", "surrogatepass")


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Decimal):
        return str(value.normalize())
    if isinstance(value, complex):
        return [value.real, value.imag]
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if getattr(value, "tzinfo", None) is not None and hasattr(value, "astimezone"):
        return value.astimezone(UTC).isoformat()
    # NumPy's arrays and scalars, pyarrow's scalars, pyarrow's arrays, dates and times.
    for method in ("tolist", "as_py", "to_pylist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a field holds a {type(value).__name__}")


_to_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=_plain).encode
