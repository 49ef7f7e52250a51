"""What gives the values of an Arrow column by position. docs/format.md specifies the columns.

Whole columns of numbers are taken out of Arrow's buffers by NumPy, everything else by Arrow.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from data.arrays import DTYPE, Indices, check_arrays, read_arrays, view_buffer, wrap
from data.columns import INTEGER, MAX_DIGITS, Unfit
from data.record import Column

ReadColumn = Callable[[Indices], Column]
"""A function from positions in a column to the values there."""

_WIDTHS = {pa.int64(): "<i8", pa.float64(): "<f8"}


def read_column(field: pa.Field, array: pa.Array) -> ReadColumn:
    """What gives the values of the column.

    NumPy arrays come back as arrays of their own, which may be changed. Raises Unfit for a column
    that is not what its field says.
    """
    metadata = field.metadata or {}
    if DTYPE in metadata:
        check_arrays(field)
        return read_arrays(field, array)
    if metadata.keys() & INTEGER.keys():
        if field.type != pa.decimal256(MAX_DIGITS, 0):
            raise Unfit(f"whole numbers in a column of {field.type}")
        return lambda indices: [v if v is None else int(v) for v in _take(array, indices)]
    if field.type in _WIDTHS and not array.null_count:
        numbers = view_buffer(array, _WIDTHS[field.type])
        return lambda indices: numbers[indices].tolist()
    return lambda indices: _take(array, indices)


def _take(array: pa.Array, indices: Indices) -> list[Any]:
    values: list[Any] = array.take(wrap(np.ascontiguousarray(indices))).to_pylist()
    return values
