"""One type for the columns that several shards have of one field."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from data.columns import INTEGER, MAX_DIGITS, Unfit

if TYPE_CHECKING:
    import pyarrow as pa

_INT64_DIGITS = 19


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
        metadata = INTEGER if all(_is_whole(f) for f in (first, second)) else None
    return pa.field(first.name, _unify_types(first.type, second.type), metadata=metadata)


def conform(
    field: "pa.Field", wanted: "pa.Field", column: "pa.Array"
) -> "tuple[pa.Field, pa.Array]":
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
        if precision <= MAX_DIGITS:
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
