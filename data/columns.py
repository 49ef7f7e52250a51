"""The values of one field as an Arrow column, and back. docs/format.md specifies the columns.

NumPy and pyarrow load when a column is built or read, not with this module.
"""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from data.arrays import Indices

ReadColumn = Callable[["Indices | None"], list[Any]]
"""A function from positions in a column to the values there, or to all of them for None."""

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
_INTEGER = {b"convoy:integer": b"1"}
_MAX_DIGITS = 76
_INT64_DIGITS = 19


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


def read_column(field: "pa.Field", column: "pa.ChunkedArray") -> ReadColumn:
    """What gives the values of the column.

    NumPy arrays come back as arrays of their own, which may be changed.
    """
    from data.arrays import DTYPE, read_arrays

    metadata = field.metadata or {}
    if DTYPE in metadata:
        reader: ReadColumn = read_arrays(field, column)
        return reader
    convert: type | None = int if b"convoy:integer" in metadata else None

    def take(indices: "Indices | None") -> list[Any]:
        chosen = column if indices is None else column.take(indices)
        values: list[Any] = chosen.to_pylist()
        return [v if v is None else convert(v) for v in values] if convert else values

    return take


def check_column(field: "pa.Field") -> None:
    """Raise Unfit unless what the field's metadata says of its values fits its type."""
    import pyarrow as pa

    from data.arrays import DTYPE, check_arrays

    metadata = field.metadata or {}
    if DTYPE in metadata:
        check_arrays(field)
    elif b"convoy:integer" in metadata and field.type != pa.decimal256(_MAX_DIGITS, 0):
        raise Unfit(f"whole numbers in a column of {field.type}")


def unify(first: "pa.Field", second: "pa.Field") -> "pa.Field":
    """The field that can hold the columns of both. Raises Unfit.

    Arrays of one NumPy dtype may be stored in two ways, and then `first` is given.
    """
    import pyarrow as pa

    from data.arrays import DTYPE

    if pa.types.is_null(first.type):
        return second
    if pa.types.is_null(second.type):
        return first
    dtypes = [(field.metadata or {}).get(DTYPE) for field in (first, second)]
    if dtypes != [None, None]:
        if dtypes[0] == dtypes[1]:
            return first
        raise Unfit(f"{_describe(first)} and {_describe(second)}")
    metadata = None
    if first.metadata or second.metadata:
        types = (first.type, second.type)
        if not all(pa.types.is_int64(t) or pa.types.is_decimal(t) for t in types):
            raise Unfit(f"{_describe(first)} and {_describe(second)}")
        metadata = _INTEGER if all(_is_whole(f) for f in (first, second)) else None
    return pa.field(first.name, _unify_types(first.type, second.type), metadata=metadata)


def conform(
    field: "pa.Field", wanted: "pa.Field", column: "pa.ChunkedArray"
) -> "tuple[pa.Field, pa.Array | pa.ChunkedArray]":
    """The column of `field` as one of `wanted`, which unify gave. Raises Unfit."""
    import pyarrow as pa

    from data.arrays import DTYPE, build_missing

    if not is_other(field, wanted):
        return field, column
    if DTYPE in (wanted.metadata or {}):
        return build_missing(wanted, len(column))
    try:
        return wanted, pa.array(column.to_pylist(), wanted.type)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        raise Unfit(f"{_describe(field)} and {_describe(wanted)}") from None


def is_other(field: "pa.Field", wanted: "pa.Field") -> bool:
    """Whether a column of `field` must be written anew to be one of `wanted`."""
    from data.arrays import DTYPE

    metadata, wanted_metadata = field.metadata or {}, wanted.metadata or {}
    if DTYPE in metadata and metadata[DTYPE] == wanted_metadata.get(DTYPE):
        return False
    return bool(field.type != wanted.type or metadata != wanted_metadata)


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
        if value is not None and abs(value) >= 10**_MAX_DIGITS:
            raise Unfit(f"a whole number has more than {_MAX_DIGITS} digits", index)
    decimals = [None if value is None else Decimal(value) for value in values]
    kind = pa.decimal256(_MAX_DIGITS, 0)
    return pa.field(name, kind, metadata=_INTEGER), pa.array(decimals, kind)


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


def _unify_types(first: "pa.DataType", second: "pa.DataType") -> "pa.DataType":
    import pyarrow as pa
    from pyarrow import types

    pair = (first, second)
    if first == second or types.is_null(second):
        return first
    if types.is_null(first):
        return second
    if {pa.int64(), pa.float64()} == set(pair):
        return pa.float64()
    if all(types.is_decimal(t) or types.is_int64(t) for t in pair):
        scales = [0 if types.is_int64(t) else t.scale for t in pair]
        digits = [_INT64_DIGITS if types.is_int64(t) else t.precision - t.scale for t in pair]
        precision = max(digits) + max(scales)
        if precision <= _MAX_DIGITS:
            make = pa.decimal128 if precision <= 38 else pa.decimal256
            return make(precision, max(scales))
    if all(types.is_timestamp(t) and t.tz is not None for t in pair):
        return pa.timestamp("us", "UTC")
    if all(types.is_list(t) for t in pair):
        return pa.list_(_unify_types(first.value_type, second.value_type))
    if all(types.is_struct(t) for t in pair):
        return pa.struct(list(_unify_members(first, second)))
    raise Unfit(f"{first} and {second}")


def _unify_members(first: "pa.StructType", second: "pa.StructType") -> "Iterator[pa.Field]":
    for member in first:
        index = second.get_field_index(member.name)
        yield (
            member
            if index < 0
            else member.with_type(_unify_types(member.type, second.field(index).type))
        )
    yield from (member for member in second if first.get_field_index(member.name) < 0)


def _is_whole(field: "pa.Field") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_int64(field.type) or field.metadata)


def _describe(field: "pa.Field") -> str:
    from data.arrays import DTYPE

    dtype = (field.metadata or {}).get(DTYPE)
    return f"NumPy arrays of {dtype.decode()}" if dtype else str(field.type)
