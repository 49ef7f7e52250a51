"""A record of a raw input file, and what is said where it cannot be read."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.values import Convert, is_empty, read_fields


class SourceError(DataError):
    """A raw input file is missing, or something in it cannot be read."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record of a raw input file, as it stands there, and where it stands."""

    file: Path
    number: int
    """The line on which it begins, from 1; in a parquet file the row, from 1."""
    fields: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"

    def read(self, types: Mapping[str, Convert], required: Collection[str] = ()) -> dict[str, Any]:
        """The fields that `types` names, each converted; None for an empty or absent one.

        Raises SourceError naming file, line and field.
        """
        try:
            fields = read_fields(self.fields, types)
        except ValueError as error:
            raise SourceError(f"{self.place}: {error}") from None
        self.check(fields, required)
        return fields

    def check(self, fields: Mapping[str, Any], required: Collection[str]) -> None:
        """Raise SourceError naming file, line and field unless each of these has a value."""
        for name in required:
            if is_empty(fields.get(name)):
                raise SourceError(
                    f"{self.place}: field '{name}' is empty: fill it in, or leave the record out"
                )

    def digest(self, names: Collection[str]) -> str:
        """SHA-256 of these fields as they stand in the file, hex: what to group records by, so that
        which of them are held out does not depend on what is made of them."""
        given = {name: value for name in names if not is_empty(value := self.fields.get(name))}
        content = json.dumps(given, sort_keys=True, ensure_ascii=False, default=_name_bytes)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _name_bytes(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
