"""One sample and the territory whose law it is under: all of Convoy that a workload imports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, overload

if TYPE_CHECKING:
    import numpy as np

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

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """`columns` is at least one, all equally long."""
        self._columns = columns

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "Records":
        """Records of mappings, of which there is at least one; a field that one lacks is None."""
        if isinstance(rows, Records):
            return rows
        names = dict.fromkeys(chain.from_iterable(rows))
        return cls({name: [row.get(name) for row in rows] for name in names})

    def column(self, name: str) -> Column:
        """A field of all records. Raises KeyError."""
        return self._columns[name]

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Records": ...
    def __getitem__(self, key: int | slice) -> "dict[str, Any] | Records":
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
