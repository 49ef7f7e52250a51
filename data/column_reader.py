"""What gives the values of an Arrow column by position. docs/format.md specifies the columns.

A column of a shard can be joined with those of other shards, so that records of a whole window are
taken at once, wherever they stand. Numbers, texts and arrays of one shape are then found by address
and copied once; of everything else each shard gives its part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from data.arrays import (
    DTYPE,
    SHAPE,
    Array,
    Indices,
    check_arrays,
    find_missing,
    read_arrays,
    view_arrays,
    view_buffer,
    wrap,
)
from data.columns import INTEGER, MAX_DIGITS, Unfit
from data.record import Column

_WIDTHS = {pa.int64(): "<i8", pa.float64(): "<f8"}
_VIEWS = {pa.string(): pa.string_view(), pa.binary(): pa.binary_view()}
_VIEW = np.dtype([("size", "<i4"), ("start", "S4"), ("buffer", "<i4"), ("offset", "<i4")])
"""Arrow's view of a text: those of at most _INLINE_BYTES lie in it, from `start` on."""
_INLINE_BYTES = 12


class ReadColumn(Protocol):
    """Gives the values at positions of a column, which may be changed."""

    def take(self, indices: Indices) -> Column: ...


@dataclass(frozen=True)
class Numbers:
    """Whole numbers or floats, none of them missing."""

    values: Array

    def take(self, indices: Indices) -> Column:
        numbers: list[Any] = self.values[indices].tolist()
        return numbers


@dataclass(frozen=True)
class Texts:
    """Texts or bytes, by Arrow's views of them: to take one is to copy its content once."""

    kind: pa.DataType
    views: Array
    buffers: tuple[pa.Buffer, ...]
    is_missing: Array | None

    def take(self, indices: Indices) -> Column:
        views = self.views.take(indices)
        buffers = [None, pa.py_buffer(views), *self.buffers]
        texts: list[Any] = pa.Array.from_buffers(self.kind, len(views), buffers).to_pylist()
        if self.is_missing is not None:
            for place in np.flatnonzero(self.is_missing[indices]).tolist():
                texts[place] = None
        return texts


@dataclass(frozen=True)
class Blocks:
    """Arrays of one shape, none of them missing, which lie one after another."""

    values: Array

    def take(self, indices: Indices) -> Column:
        return self.values.take(indices, axis=0)


@dataclass(frozen=True)
class SpreadBlocks:
    """The same, which begin anywhere in one memory."""

    memory: Array
    starts: Indices
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def take(self, indices: Indices) -> Column:
        # As if one began at each byte: NumPy copies those asked for, and checks the bounds.
        size = self.dtype.itemsize * int(np.prod(self.shape))
        count = self.memory.nbytes - size + 1
        every = np.ndarray((count,), f"V{size}", self.memory, strides=(1,))
        return every[self.starts[indices]].view(self.dtype).reshape(-1, *self.shape)


@dataclass(frozen=True)
class Values:
    """Everything else."""

    read: Callable[[Indices], Column]

    def take(self, indices: Indices) -> Column:
        return self.read(indices)


@dataclass(frozen=True)
class Parts:
    """Columns one after another, each of which is asked for its part."""

    columns: Sequence[ReadColumn]
    ends: Indices

    def take(self, indices: Indices) -> Column:
        parts = np.searchsorted(self.ends, indices, side="right")
        by_part = np.argsort(parts, kind="stable")
        parts, rows = parts[by_part], (indices - np.append(0, self.ends)[parts])[by_part]
        cuts = (*np.flatnonzero(np.diff(parts, prepend=-1)).tolist(), len(parts))
        taken = [self.columns[parts[first]].take(rows[first:end]) for first, end in pairwise(cuts)]
        places = np.empty_like(by_part)
        places[by_part] = np.arange(len(by_part))
        values = join_values(taken)
        if isinstance(values, list):
            return [values[place] for place in places.tolist()]
        return values.take(places, axis=0)


def read_column(field: pa.Field, array: pa.Array) -> ReadColumn:
    """What gives the values of the column.

    NumPy arrays come back as arrays of their own. Raises Unfit for a column that is not what its
    field says.
    """
    metadata = field.metadata or {}
    if DTYPE in metadata:
        check_arrays(field)
        if SHAPE in metadata and not array.null_count:
            return Blocks(view_arrays(field, array))
        return Values(read_arrays(field, array))
    if metadata.keys() & INTEGER.keys():
        if field.type != pa.decimal256(MAX_DIGITS, 0):
            raise Unfit(f"whole numbers in a column of {field.type}")
        return Values(lambda indices: [v if v is None else int(v) for v in _take(array, indices)])
    if field.type in _WIDTHS and not array.null_count:
        return Numbers(view_buffer(array, _WIDTHS[field.type]))
    if field.type in _VIEWS:
        return _view_texts(array)
    return Values(lambda indices: _take(array, indices))


def join_columns(columns: Sequence[ReadColumn], sizes: Sequence[int], memory: Array) -> ReadColumn:
    """One column of several of these sizes, one after another; `memory` is where their content may
    lie."""
    joined: ReadColumn | None = None
    if len(columns) == 1:
        joined = columns[0]
    elif all(isinstance(column, Numbers) for column in columns):
        joined = Numbers(np.concatenate([column.values for column in columns]))  # type: ignore[attr-defined]
    elif all(isinstance(column, Texts) for column in columns):
        joined = _join_texts(columns)  # type: ignore[arg-type]
    elif all(isinstance(column, Blocks) for column in columns):
        joined = _join_blocks([column.values for column in columns], memory)  # type: ignore[attr-defined]
    return joined or Parts(columns, np.cumsum(sizes))


def join_values(parts: Sequence[Column]) -> Column:
    """The values of one column, part after part."""
    blocks = [part for part in parts if isinstance(part, np.ndarray)]
    if len(blocks) == len(parts) and len({block.shape[1:] for block in blocks}) == 1:
        return np.concatenate(blocks)
    return [value for part in parts for value in part]


def _view_texts(array: pa.Array) -> Texts:
    kind = _VIEWS[array.type]
    viewed = array.cast(kind)
    _, views, *buffers = viewed.buffers()
    found = np.frombuffer(views, _VIEW, len(array), viewed.offset * _VIEW.itemsize)
    is_missing = None
    if array.null_count:
        is_missing = np.zeros(len(array), bool)
        is_missing[find_missing(array)] = True
        found = np.where(is_missing, np.zeros(1, _VIEW), found)
    return Texts(kind, found, tuple(buffers), is_missing)


def _join_texts(columns: Sequence[Texts]) -> Texts:
    parts: list[Array] = []
    buffers: list[pa.Buffer] = []
    missing: list[Array] = []
    for column in columns:
        views = column.views.copy()
        views["buffer"][views["size"] > _INLINE_BYTES] += len(buffers)
        parts.append(views)
        buffers += column.buffers
        none = np.zeros(len(views), bool)
        missing.append(none if column.is_missing is None else column.is_missing)
    is_missing = np.concatenate(missing)
    return Texts(
        columns[0].kind,
        np.concatenate(parts),
        tuple(buffers),
        is_missing if is_missing.any() else None,
    )


def _join_blocks(blocks: Sequence[Array], memory: Array) -> SpreadBlocks | None:
    """None if they do not all lie in the memory, or differ in shape."""
    first = blocks[0]
    if len({(block.dtype, block.shape[1:]) for block in blocks}) > 1:
        return None
    starts = []
    for block in blocks:
        start = block.ctypes.data - memory.ctypes.data
        if not 0 <= start <= memory.nbytes - block.nbytes:
            return None
        starts.append(start + np.arange(len(block)) * first[0].nbytes)
    return SpreadBlocks(memory, np.concatenate(starts), first.dtype, first.shape[1:])


def _take(array: pa.Array, indices: Indices) -> list[Any]:
    values: list[Any] = array.take(wrap(np.ascontiguousarray(indices))).to_pylist()
    return values
