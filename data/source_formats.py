"""The rows of one raw input file: jsonl, csv, parquet and plain text, compressed or not."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.compression import COMPRESSIONS, CUT_OR_DAMAGED, find_compression, open_source
from data.source_row import Row, SourceError

_DELIMITERS = ",;\t|"
_MAX_FIELD_BYTES = 16 << 20


def find_format(path: Path) -> str:
    """`csv`, `jsonl`, `parquet` or `text`, by the end of the file's name, before that of a
    compression. Raises SourceError."""
    suffix = _inner_suffix(path)
    if suffix not in _SUFFIXES:
        raise SourceError(
            f"{path}: files ending in '{suffix}' are not read; known are {', '.join(_SUFFIXES)}, "
            f"and each of them with {', '.join(COMPRESSIONS)} after it. Convert it, or write a "
            "records() that reads it"
        )
    if _SUFFIXES[suffix] == "parquet" and find_compression(path):
        raise SourceError(
            f"{path}: parquet is compressed within and needs to be read from its end: "
            "decompress the file"
        )
    return _SUFFIXES[suffix]


def _inner_suffix(path: Path) -> str:
    return (path.with_suffix("") if find_compression(path) else path).suffix.lower()


def read_file(path: Path, remedy: str) -> Iterator[Row]:
    """Its rows. Raises SourceError naming file and line, and with this remedy if there are none."""
    read = _READERS[find_format(path)]
    empty = True
    for row in read(path):
        empty = False
        yield row
    if empty:
        raise SourceError(f"{path} holds no record{_tell_header(path)}: {remedy}")


def _tell_header(path: Path) -> str:
    is_headed = not find_compression(path) and path.stat().st_size and find_format(path) != "text"
    return ", but names of columns alone" if is_headed and find_format(path) != "jsonl" else ""


def _read_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(_MAX_FIELD_BYTES)
    delimiter = "\t" if _inner_suffix(path) == ".tsv" else _find_delimiter(path)
    reader = csv.reader(_lines(path), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    begin = 1
    try:
        for cells in reader:
            if header is None:
                header = _name_columns(path, cells)
            elif cells:
                if len(cells) != len(header):
                    raise SourceError(
                        f"{path}:{begin}: {len(cells)} fields, but the header names "
                        f"{len(header)}: quote values that hold '{delimiter}', or correct the line"
                    )
                yield Row(path, begin, dict(zip(header, cells, strict=True)))
            begin = reader.line_num + 1
    except csv.Error as error:
        raise SourceError(
            f"{path}:{begin}: not csv ({error}): look for a quote that is not closed"
        ) from None


def _find_delimiter(path: Path) -> str:
    """The one that gives the header most columns; csv.Sniffer guesses from the values' text."""
    widths: dict[str, int] = {}
    for delimiter in _DELIMITERS:
        try:
            widths[delimiter] = len(next(csv.reader(_lines(path), delimiter=delimiter), []))
        except csv.Error as error:
            raise SourceError(f"{path}:1: not csv ({error}): correct the header") from None
    return max(widths, key=lambda delimiter: widths[delimiter])


def _name_columns(path: Path, cells: list[str]) -> list[str]:
    names = [cell.strip() or f"column_{index}" for index, cell in enumerate(cells, start=1)]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise SourceError(f"{path}:1: two columns are named '{repeated}': rename one")
    return names


def _read_jsonl(path: Path) -> Iterator[Row]:
    for begin, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise SourceError(
                f"{path}:{begin}: not JSON ({error.msg}, column {error.colno}): "
                "write one object a line"
            ) from None
        except (ValueError, RecursionError):
            raise SourceError(
                f"{path}:{begin}: a number has too many digits, or lists stand too deep in each "
                "other: correct the line"
            ) from None
        if not isinstance(fields, dict):
            raise SourceError(f"{path}:{begin}: not a JSON object: write one object a line")
        yield Row(path, begin, fields)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    begin = 1
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    yield Row(path, begin, fields)
                    begin += 1
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, begin, error) from None


def _read_text(path: Path) -> Iterator[Row]:
    for begin, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield Row(path, begin, {"text": line.strip()})


def check_schema(path: Path, first: tuple[Path, Any] | None) -> tuple[Path, Any]:
    """Raise SourceError unless a parquet file has the columns of the folder's first one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, 1, error) from None
    if first is None:
        return path, schema
    other, expected = first
    for name in sorted({*schema.names, *expected.names}):
        here, there = (s.field(name).type if name in s.names else None for s in (schema, expected))
        if here != there:
            raise SourceError(
                f"{path}: field '{name}' is {here or 'not there'}, but {there or 'not there'} in "
                f"{other}: write both with the same columns, or put them in two folders"
            )
    return first


def _not_parquet(path: Path, row: int, error: Exception) -> SourceError:
    return SourceError(
        f"{path}: row {row}: parquet cannot be read ({type(error).__name__}): "
        "the file is cut or of another format; write it again"
    )


def _lines(path: Path) -> Iterator[str]:
    """Decoded line by line, so that an error can name the line."""
    begin = 0
    try:
        with open_source(path) as file:
            for begin, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if begin == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path}:{begin}: byte {error.start + 1} of the line is not UTF-8: "
            "save the file as UTF-8"
        ) from None
    except (*CUT_OR_DAMAGED, OSError) as error:
        compression = find_compression(path)
        what = f"it is no whole {compression} file" if compression else "it cannot be read"
        raise SourceError(
            f"{path}:{begin + 1}: {what} ({type(error).__name__}): it is cut or damaged; fetch or "
            "write it again"
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "csv": _read_csv,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "text": _read_text,
}
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
