"""NumPy arrays as an Arrow column, and back: of one dtype, and of one shape or of many."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import pyarrow as pa

from data.columns import Unfit
from data.record import Column

DTYPE = b"convoy:dtype"
"""Key of a field's metadata: the dtype of its arrays in NumPy's notation, little-endian."""
SHAPE = b"convoy:shape"
"""The same for their one shape, as `28,28`; absent where the shapes differ."""

Array = np.ndarray[Any, np.dtype[Any]]
Indices = np.ndarray[Any, np.dtype[np.int64]]

_DTYPE = re.compile(
    r"\|[biu]1|<[iu][248]|<f[248]|<c(8|16)"
    r"|<[mM]8(\[([1-9]\d{0,4})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_STORED = {"b": "u1", "c": "f", "m": "<i8", "M": "<i8"}


def build_arrays(name: str, values: Sequence[Any]) -> tuple[pa.Field, pa.Array] | None:
    """The column of these arrays, or None for those of text or objects, which are lists instead.

    Raises Unfit.
    """
    missing = np.fromiter(map(partial(is_, None), values), bool, len(values))
    mask = pa.array(missing) if missing.any() else None
    arrays = [value for value in values if value is not None] if mask else values
    dtype = _find_dtype(values, {array.dtype for array in arrays})
    shapes = {array.shape for array in arrays}
    if dtype is None or () in shapes:
        return None
    metadata = {DTYPE: dtype.str.encode()}
    if len(shapes) == 1 and arrays[0].size:
        (shape,) = shapes
        metadata[SHAPE] = ",".join(map(str, shape)).encode()
        column = _build_fixed(np.concatenate(arrays), dtype, missing, mask)
    else:
        column = _build_ragged(values, arrays, dtype, mask)
    return pa.field(name, column.type, metadata=metadata), column


def build_missing(wanted: pa.Field, count: int) -> tuple[pa.Field, pa.Array]:
    """The column of so many missing arrays, of the same dtype as those of `wanted`."""
    dtype = np.dtype(wanted.metadata[DTYPE].decode())
    column = _build_ragged([None] * count, [], dtype, pa.array(np.ones(count, bool)))
    return pa.field(wanted.name, column.type, metadata={DTYPE: dtype.str.encode()}), column


def check_arrays(field: pa.Field) -> None:
    """Raise Unfit unless a column of this type can hold the arrays that its metadata tells of."""
    text = field.metadata[DTYPE].decode("utf-8", "replace")
    if not _DTYPE.fullmatch(text):
        raise Unfit(f"arrays of a dtype that the format has not: {text[:20]!r}")
    dtype = np.dtype(text)
    item = pa.from_numpy_dtype(_store(np.empty(0, dtype), dtype).dtype)
    lists = pa.list_(item)
    allowed = [lists, pa.struct({"values": lists, "shape": pa.list_(pa.int64())})]
    if SHAPE in field.metadata:
        shape = field.metadata[SHAPE].decode("utf-8", "replace")
        if not re.fullmatch(r"[1-9]\d{0,9}(,[1-9]\d{0,9}){0,63}", shape):
            raise Unfit("arrays of a shape that the format has not")
        size = _width(dtype) * math.prod(map(int, shape.split(",")))
        allowed = [pa.list_(item, size)] if size < 2**31 else []
    if field.type not in allowed:
        raise Unfit(f"arrays of {text} in a column of {field.type}")


def read_arrays(field: pa.Field, array: pa.Array) -> Callable[[Indices], Column]:
    """See data.column_reader.read_column."""
    dtype = np.dtype(field.metadata[DTYPE].decode())
    missing = find_missing(array)
    if SHAPE in field.metadata:
        block = view_arrays(field, array)
        return lambda indices: _blank(list(block[indices]), indices, missing)
    parts, shapes = array, None
    if pa.types.is_struct(array.type):
        parts, shape_lists = array.flatten()
        shapes = [tuple(shape or (0,)) for shape in shape_lists.to_pylist()]
    scale = _width(dtype)
    ends = np.frombuffer(parts.buffers()[1], "<i4", len(parts) + 1, 4 * parts.offset) // scale
    flat = view_buffer(parts.values, dtype)

    def take(indices: Indices) -> list[Any]:
        chosen = indices.tolist()
        taken = [flat[ends[i] : ends[i + 1]].copy() for i in chosen]
        if shapes is not None:
            taken = [part.reshape(shapes[i]) for part, i in zip(taken, chosen, strict=True)]
        return _blank(taken, indices, missing)

    return take


def view_arrays(field: pa.Field, array: pa.Array) -> Array:
    """The arrays of one shape, one after another, as they lie in the column."""
    shape = tuple(map(int, field.metadata[SHAPE].split(b",")))
    block = view_buffer(array.values, field.metadata[DTYPE].decode()).reshape(-1, *shape)
    return block[array.offset : array.offset + len(array)]


def view_buffer(array: pa.Array, dtype: str | np.dtype[Any]) -> Array:
    """The elements of a column of numbers, as they lie in it.

    Arrow's own conversion would load pandas, which takes most of a second.
    """
    if array.null_count:
        raise Unfit("a number is missing where none may be")
    width, dtype = array.type.bit_width // 8, np.dtype(dtype)
    content = array.buffers()[1] if len(array) else b""
    count = len(array) * width // dtype.itemsize
    return np.frombuffer(content, dtype, count, array.offset * width)


def find_missing(array: pa.Array) -> Indices:
    """Positions of the column's nulls."""
    if not array.null_count:
        return np.empty(0, np.int64)
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    is_there = np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)]
    return np.flatnonzero(is_there == 0)


def _find_dtype(values: Sequence[Any], found: set[np.dtype[Any]]) -> np.dtype[Any] | None:
    first: np.dtype[Any] | None = None
    for dtype in sorted(found, key=lambda dtype: _index_of(values, dtype)):
        if dtype.kind in "OUST":
            return None
        if dtype.kind == "V" or dtype.itemsize > (16 if dtype.kind == "c" else 8):
            raise Unfit(f"NumPy arrays of {dtype} have no Arrow type", _index_of(values, dtype))
        little = dtype.newbyteorder("<")
        if first is not None and little != first:
            reason = f"a NumPy array of {dtype}, and of {first} before"
            raise Unfit(reason, _index_of(values, dtype))
        first = little
    return first


def _index_of(values: Sequence[Any], dtype: np.dtype[Any]) -> int:
    return next(i for i, v in enumerate(values) if v is not None and v.dtype == dtype)


def _build_fixed(
    stacked: Array, dtype: np.dtype[Any], missing: Array, mask: pa.Array | None
) -> pa.Array:
    flat = _store(stacked, dtype)
    size = flat.size // int((~missing).sum())
    if mask is not None:
        whole = np.zeros((len(missing), size), flat.dtype)
        whole[~missing] = flat.reshape(-1, size)
        flat = whole.reshape(-1)
    return pa.FixedSizeListArray.from_arrays(wrap(flat), size, mask=mask)


def _build_ragged(
    values: Sequence[Any], arrays: Sequence[Array], dtype: np.dtype[Any], mask: pa.Array | None
) -> pa.Array:
    parts = [array.reshape(-1) for array in arrays]
    flat = _store(np.concatenate(parts) if parts else np.empty(0), dtype)
    sizes = [0 if value is None else value.size * _width(dtype) for value in values]
    one_dimension = all(array.ndim == 1 for array in arrays)
    lists = pa.ListArray.from_arrays(
        _offsets(sizes), wrap(flat), mask=mask if one_dimension else None
    )
    if one_dimension:
        return lists
    shapes = pa.array([() if v is None else v.shape for v in values], pa.list_(pa.int64()))
    return pa.StructArray.from_arrays([lists, shapes], ["values", "shape"], mask=mask)


def _offsets(sizes: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *sizes]), pa.int32())


def _width(dtype: np.dtype[Any]) -> int:
    """How many stored numbers one element takes: a complex number is two."""
    return 2 if dtype.kind == "c" else 1


def _store(array: Array, dtype: np.dtype[Any]) -> Array:
    """The elements as numbers that Arrow knows, flat."""
    flat = np.ascontiguousarray(array, dtype).reshape(-1)
    stored = _STORED.get(dtype.kind, dtype.str)
    return flat.view(f"<f{dtype.itemsize // 2}" if stored == "f" else stored)


def wrap(flat: Array) -> pa.Array:
    """A column of these numbers. Arrow's own conversion would load pandas."""
    kind = pa.from_numpy_dtype(flat.dtype)
    return pa.Array.from_buffers(kind, flat.size, [None, pa.py_buffer(flat)])


def _blank(taken: list[Any], indices: Indices, missing: Indices) -> list[Any]:
    for place in np.flatnonzero(np.isin(indices, missing)):
        taken[place] = None
    return taken
