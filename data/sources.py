"""Raw input files as rows of named fields: jsonl, csv, parquet and plain text, compressed or not.

A workload that `convoy init` wrote reads its input through `read_source`, inside `records()`: the
registered model carries `data.record` alone. Errors name file, line and field, never a value.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from data.source_formats import check_schema, find_format, read_file
from data.source_row import Row, SourceError
from data.values import Convert, number, text

__all__ = ["Row", "SourceError", "find_format", "jurisdiction", "number", "read_rows"]
__all__ += ["read_source", "text"]

_MAX_JURISDICTION = 64


def read_source(
    path: Path, types: Mapping[str, Convert] | None = None, required: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """The records of a file, or of all files in a folder in the order of their names.

    types: the fields to take, each with what converts a value: `number`, `text`, `jurisdiction`,
        those of data.values, or any function that raises ValueError. None stands for an empty
        value. Without types every field is given as it stands in the file.
    required: fields that must not be empty.
    Raises SourceError naming file, line and field.
    """
    for row in read_rows(path):
        if types is not None:
            yield row.read(types, required)
        else:
            row.check(row.fields, required)
            yield row.fields


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, or of all files in a folder in the order of their names, as they stand.

    Raises SourceError naming file and line.
    """
    if not path.is_dir():
        if not path.is_file():
            raise SourceError(f"there is no file {path}")
        yield from read_file(path, "write records into it, or name another file")
        return
    files = [p for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    first_schema: tuple[Path, Any] | None = None
    for file in files:
        if find_format(file) == "parquet":
            first_schema = check_schema(file, first_schema)
        yield from read_file(file, "fill it, or take it away")


def jurisdiction(value: Any) -> str:
    """A value as the name of a jurisdiction, which names files: all but letters, digits, `-` and
    `_` becomes `-`, so that `United Kingdom` is `United-Kingdom`. Raises ValueError when nothing
    is left."""
    name = re.sub(r"[^\w-]+", "-", unicodedata.normalize("NFC", text(value))).strip("-_")
    if not name or len(name) > _MAX_JURISDICTION:
        raise ValueError
    return name
