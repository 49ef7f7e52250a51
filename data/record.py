"""One sample and the territory whose law it is under: all of Convoy that a workload imports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Column: TypeAlias = "list[Any] | np.ndarray[Any, np.dtype[Any]]"
"""One field of several records: one array, whose first axis is the records, where the field holds
NumPy arrays of one shape; and otherwise a list."""


class RecordError(ValueError):
    """A record cannot be read.

    Its message names file, line and field, and never content: Convoy passes it on as it is, while
    the text of any other exception of a workload stays on the machine.
    """


@dataclass(frozen=True, slots=True)
class Record:
    """One sample.

    fields: named values of any type that Arrow can hold: text, bytes, numbers, lists, mappings.
    jurisdiction: the territory whose law binds the sample, for example "EU" or "US".
    group: samples of one group are held out together, or none of them: the parts of a text, the
        visits of a patient. Only its digest is used, and nothing of it is written. Without one it
        is the fields that decide, so that equal samples stand together.
    """

    fields: Mapping[str, Any]
    jurisdiction: str
    group: str | None = None


class Records(Sequence[dict[str, Any]]):
    """Samples as collate() and metrics receive them: a sequence of their fields.

    They are kept by column, and a mapping is made of one when it is asked for; `column` gives one
    field of all of them at once, which is several times quicker where it holds NumPy arrays.
    """

    def __init__(self, columns: Mapping[str, Column], places: "Places | None" = None) -> None:
        """`columns` is at least one, all equally long; `places` says where in them the records
        stand, one after another, if they are not all of them in order."""
        self._columns = columns
        self._places = places
        self._count = len(next(iter(columns.values())) if places is None else places)

    def __reduce__(self) -> "tuple[type[Records], tuple[Mapping[str, Column]]]":
        # What goes to another process is these records, not all that they stand among.
        return Records, ({name: self.column(name) for name in self._columns},)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "Records":
        """Records of mappings, of which there is at least one; a field that one lacks is None."""
        if isinstance(rows, Records):
            return rows
        names = dict.fromkeys(chain.from_iterable(rows))
        return cls({name: [row.get(name) for row in rows] for name in names})

    def column(self, name: str) -> Column:
        """A field of all records. Raises KeyError."""
        values = self._columns[name]
        if self._places is None:
            return values
        if isinstance(values, list):
            return [values[place] for place in self._places.tolist()]
        return values.take(self._places, axis=0)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Records": ...
    def __getitem__(self, key: int | slice) -> "dict[str, Any] | Records":
        if isinstance(key, slice) and self._places is not None:
            return Records(self._columns, self._places[key])
        if self._places is not None:
            key = int(self._places[key])
        taken = {name: values[key] for name, values in self._columns.items()}
        return Records(taken) if isinstance(key, slice) else taken

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # The first columns by literals, the others one after another into those: zipping each
        # row's names and values costs five times as much.
        names = list(self._columns)
        first = zip(*map(self.column, names[:3]), strict=True)
        match names[:3]:
            case [a]:
                rows = [{a: x} for (x,) in first]
            case [a, b]:
                rows = [{a: x, b: y} for x, y in first]
            case [a, b, c]:
                rows = [{a: x, b: y, c: z} for x, y, z in first]
        for name in names[3:]:
            for row, value in zip(rows, self.column(name), strict=True):
                row[name] = value
        return iter(rows)
