"""The values of one field as an Arrow column. docs/format.md specifies the columns.

NumPy and pyarrow load when a column is built, not with this module.
"""

import datetime
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    bytes: "bytes",
    Decimal: "a decimal",
    datetime.date: "a date",
    datetime.datetime: "a date with time",
    datetime.time: "a time of day",
    datetime.timedelta: "a duration",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
_MAY_MIX = ({"a whole number", "a number"}, {"a whole number", "a decimal"})
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
INTEGER = {b"convoy:integer": b"1"}
"""Metadata of a column of whole numbers that are too large for 64 bits."""
MAX_DIGITS = 76


class Unfit(ValueError):
    """Values that no column can hold. `index` is the first that does not fit, if it is known."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.index = index


def build_column(name: str, values: Sequence[Any]) -> "tuple[pa.Field, pa.Array]":
    """The column that holds these values of the field `name`; None is a missing value.

    Raises Unfit, whose reason holds nothing of the values.
    """
    import numpy as np
    import pyarrow as pa

    from data.arrays import build_arrays

    types = set(map(type, values)) - {type(None)}
    if types == {np.ndarray}:
        built = build_arrays(name, values)
        if built is not None:
            return built
    elif np.ndarray in types:
        first = next(type(value) for value in values if value is not None)
        index = next(i for i, v in enumerate(values) if type(v) not in (first, type(None)))
        raise Unfit("NumPy arrays and other values", index)
    if types == {str}:
        return pa.field(name, pa.string()), _build_text(values)
    return _build_values(name, values)


def _build_text(values: Sequence[Any]) -> "pa.Array":
    import pyarrow as pa

    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        index = next(i for i, v in enumerate(values) if v is not None and not _is_utf8(v))
        raise Unfit("its text holds half of a surrogate pair, which is no UTF-8", index) from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _build_values(name: str, values: Sequence[Any]) -> "tuple[pa.Field, pa.Array]":
    import pyarrow as pa

    plain = [
        value if type(value) in _PLAIN else _simplify(value, i) for i, value in enumerate(values)
    ]
    _check_kinds(plain, "")
    try:
        array = pa.array(plain)
    except OverflowError:
        return _build_large_integers(name, plain)
    except (pa.ArrowException, UnicodeEncodeError, TypeError, ValueError):
        # Arrow's own message would quote the value.
        raise Unfit("its values have no one Arrow type") from None
    return pa.field(name, array.type), array


def _build_large_integers(name: str, values: Sequence[Any]) -> "tuple[pa.Field, pa.Array]":
    import pyarrow as pa

    if any(type(value) not in (int, type(None)) for value in values):
        raise Unfit("a whole number beyond 64 bits stands within a list, or beside other numbers")
    for index, value in enumerate(values):
        if value is not None and abs(value) >= 10**MAX_DIGITS:
            raise Unfit(f"a whole number has more than {MAX_DIGITS} digits", index)
    decimals = [None if value is None else Decimal(value) for value in values]
    kind = pa.decimal256(MAX_DIGITS, 0)
    return pa.field(name, kind, metadata=INTEGER), pa.array(decimals, kind)


def _simplify(value: Any, index: int) -> Any:
    """The value made of Python's own types alone."""
    try:
        return _as_plain(value)
    except Unfit as error:
        raise Unfit(error.reason, index) from None
    except RecursionError:
        raise Unfit("it holds itself", index) from None
    except (ValueError, TypeError, OverflowError):
        raise Unfit(f"a {type(value).__name__} that has no plain value", index) from None


def _as_plain(value: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    kind = type(value)
    if kind in _PLAIN or kind is Decimal:
        return value
    if kind is list or kind is tuple:
        return value if _PLAIN.issuperset(map(type, value)) else [_as_plain(v) for v in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise Unfit("a mapping within it has keys that are not text")
        return {str(key): _as_plain(v) for key, v in value.items()}
    if isinstance(value, np.datetime64 | np.timedelta64):
        exact = value.astype(f"{value.dtype.kind}8[us]")
        if exact.astype(value.dtype) != value:
            raise Unfit("a NumPy time is finer than a microsecond: give an array of it")
        return exact.item()
    if isinstance(value, np.generic) and not isinstance(value, np.void | np.longdouble):
        return _as_plain(value.item())
    if isinstance(value, np.ndarray):
        return _as_plain(value.tolist())
    if isinstance(value, pa.Scalar):
        return _as_plain(value.as_py())
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return _as_plain(value.to_pylist())
    if isinstance(value, datetime.time) and value.tzinfo is not None:
        raise Unfit("a time of day has a zone: give a date with time, or leave the zone out")
    if kind in _KINDS:
        return value
    return _as_base(value)


def _as_base(value: Any) -> Any:
    """An instance of a subclass (an enumeration, a time stamp of pandas) as one of its base."""
    if isinstance(value, bytearray | memoryview | bytes):
        return bytes(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, datetime.datetime):
        if getattr(value, "nanosecond", 0):
            raise Unfit("a time stamp is finer than a microsecond: give a NumPy array of it")
        return datetime.datetime.combine(value.date(), value.timetz())
    if isinstance(value, list | tuple):
        return [_as_plain(v) for v in value]
    raise Unfit(
        f"it holds a {type(value).__name__}; fields hold text, bytes, numbers, dates, lists, "
        "mappings and NumPy arrays"
    )


def _check_kinds(values: Sequence[Any], path: str) -> None:
    """Raise Unfit where Arrow would turn one kind into another in silence, or say it less well."""
    types = set(map(type, values)) - {type(None)}
    kinds = {_KINDS[kind] for kind in types}
    where = f"at '{path}' " if path else ""
    if len(kinds) > 1 and kinds not in _MAY_MIX:
        first = next(_KINDS[type(v)] for v in values if v is not None)
        index = next(i for i, v in enumerate(values) if v is not None and _KINDS[type(v)] != first)
        found = _KINDS[type(values[index])]
        raise Unfit(f"{where}it is {found}, and {first} before", None if path else index)
    if types == {datetime.datetime}:
        zoned = [value.tzinfo is not None for value in values if value is not None]
        if len(set(zoned)) > 1:
            raise Unfit(f"{where}some times have a zone and others none")
    elif kinds == {"a list"}:
        _check_kinds(list(chain.from_iterable(v for v in values if v is not None)), f"{path}[]")
    elif kinds == {"a mapping"}:
        for key in dict.fromkeys(chain.from_iterable(v for v in values if v is not None)):
            inner = [v[key] for v in values if v is not None and key in v]
            _check_kinds(inner, f"{path}.{key}" if path else key)
