"""What is in a raw input file, before anybody decides what to make of it."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from data.sources import Row, SourceError, find_format, read_rows
from data.values import Convert, comma_number, days, is_empty, number, text

Kind = Literal[
    "number", "date", "category", "text", "identifier", "serial", "nested", "other", "empty"
]
"""serial: whole numbers that only count the records, each one more than the one before.
category: texts of which there are few. identifier: another text in every record, all about as
long, without a space and with a digit. nested: lists or mappings. other: neither text, number nor
date."""

MAX_CATEGORIES = 100
MAX_JURISDICTIONS = 250
_LIKELY_NAMES = ("jurisdiction", "country", "nation", "territory", "region", "state", "market")
_MAX_CATEGORY_LENGTH = 40
_MIN_IDENTIFIERS = 20
"""Fewer records may differ by chance."""
_MAX_IDENTIFIER_SPREAD = 4
"""Characters between the shortest and the longest: from `c1` to `c99999`."""
_MAX_ODD_SHARE = 0.01
"""Of the cells of a field of numbers or dates: so many may hold none, and count as missing."""
_MIN_LIKENESS = 0.9
"""Share of the cells from which a field looks like one of numbers or dates."""
_THOUSANDS = re.compile(r"\d+,\d{3}")
_IDENTIFIER = re.compile(r"(?=.*\d)\S+")


@dataclass(frozen=True)
class FieldSummary:
    """One field, without its values; only a likely jurisdiction shows its own."""

    name: str
    kind: Kind
    num_empty: int
    """Records without it."""
    num_distinct: int | None
    """None for more than MAX_JURISDICTIONS."""
    values: tuple[tuple[str, int], ...] = ()
    """Values with their records, most frequent first."""
    convert: Convert = text
    """What reads it: number, comma_number, days or text."""
    likeness: Literal["number", "date"] | None = None
    """What nearly all of its cells are, or all."""
    num_odd: int = 0
    """Cells that are not what it looks like."""
    first_odd: str = ""
    """The first of them, as file and line."""


@dataclass(frozen=True)
class SourceSummary:
    """What a raw input file holds."""

    path: Path
    format: str
    num_records: int
    fields: tuple[FieldSummary, ...]
    likely_jurisdictions: tuple[str, ...]
    """Fields that may say whose law binds a record, likeliest first."""

    def find(self, name: str, option: str) -> FieldSummary:
        """The field of this name. Raises SourceError naming the option and the fields."""
        for candidate in self.fields:
            if candidate.name == name:
                return candidate
        raise SourceError(
            f"{option}: {self.path} has no field '{name}'; it has {self.list_names()}"
        )

    def list_names(self) -> str:
        return ", ".join(candidate.name for candidate in self.fields)


def inspect_source(source: Path) -> SourceSummary:
    """Read a jsonl, csv, parquet or text file once. Memory does not grow with the file.

    Raises SourceError for a file that is missing, empty or broken, naming file and line.
    """
    if source.is_dir():
        raise SourceError(
            f"{source} is a folder: name one of its files; afterwards params.yaml: ingest.source "
            "may name the folder, and every file in it is read"
        )
    columns: dict[str, _Column] = {}
    num_records = 0
    for row in read_rows(source):
        num_records += 1
        _add(columns, row)
    if not num_records:
        raise SourceError(f"{source} holds no record: is it the right file?")
    likely = _find_likely(columns)
    return SourceSummary(
        path=source,
        format=find_format(source),
        num_records=num_records,
        fields=tuple(
            column.summarise(name, num_records, show=name in likely)
            for name, column in columns.items()
        ),
        likely_jurisdictions=likely,
    )


@dataclass
class _Trial:
    """Which cells of a field a function converts."""

    convert: Convert
    likeness: Literal["number", "date"]
    num_odd: int = 0
    first_odd: str = ""

    def add(self, value: Any, row: Row) -> Any:
        try:
            return self.convert(value)
        except (ValueError, TypeError, OverflowError):
            self.num_odd += 1
            self.first_odd = self.first_odd or row.place
            return None


@dataclass
class _Column:
    num_given: int = 0
    num_letters: int = 0
    shortest: float = math.inf
    longest: int = 0
    is_text: bool = True
    is_nested: bool = False
    is_serial: bool = True
    is_identifier: bool = True
    has_decimal_comma: bool = False
    """Whether some comma can be nothing else: 127,3 and not 127,300."""
    previous: float | None = None
    points: _Trial = field(default_factory=lambda: _Trial(number, "number"))
    commas: _Trial = field(default_factory=lambda: _Trial(comma_number, "number"))
    dates: _Trial = field(default_factory=lambda: _Trial(days, "date"))
    counts: Counter[str] | None = field(default_factory=Counter)
    """None once there are more than MAX_JURISDICTIONS."""

    def add(self, value: Any, row: Row) -> None:
        self.num_given += 1
        self.is_nested = self.is_nested or isinstance(value, list | dict)
        self._add_number(value, row)
        if self.is_text:
            self._add_text(value)

    def _add_number(self, value: Any, row: Row) -> None:
        num_odd = self.points.num_odd
        amount = self.points.add(value, row)
        if self.points.num_odd > num_odd:
            self.is_serial = False
            self.dates.add(value, row)
            if self.commas.add(value, row) is not None:
                self.has_decimal_comma |= _THOUSANDS.fullmatch(value.strip()) is None
            return
        self.dates.num_odd += 1
        self.dates.first_odd = self.dates.first_odd or row.place
        if self.is_serial:
            previous, self.previous = self.previous, amount
            first = self.num_given == 1
            self.is_serial = amount is not None and (
                first or (previous is not None and amount == previous + 1)
            )

    def _add_text(self, value: Any) -> None:
        try:
            words = text(value)
        except ValueError:
            self.is_text, self.counts = False, None
            return
        self.is_text = isinstance(value, str | bytes | int | float | Decimal | list | dict | date)
        self.num_letters += len(words)
        self.shortest, self.longest = min(self.shortest, len(words)), max(self.longest, len(words))
        self.is_identifier = self.is_identifier and _IDENTIFIER.fullmatch(words) is not None
        if self.counts is not None:
            self.counts[words] += 1
            # Whether a value comes twice is looked at among as many as are kept.
            self.is_identifier = self.is_identifier and self.counts[words] == 1
            if len(self.counts) > MAX_JURISDICTIONS:
                self.counts = None

    @property
    def trial(self) -> _Trial:
        """The best of the three."""
        numbers = self.commas if self.has_decimal_comma else self.points
        return min(numbers, self.dates, key=lambda trial: trial.num_odd)

    @property
    def kind(self) -> Kind:
        if not self.num_given:
            return "empty"
        if self.is_nested:
            return "nested"
        if self.trial.num_odd <= _MAX_ODD_SHARE * self.num_given:
            if self.trial.likeness == "date":
                return "date"
            return "serial" if self.is_serial and self.num_given > 2 else "number"
        if not self.is_text:
            return "other"
        alike = self.longest - self.shortest <= _MAX_IDENTIFIER_SPREAD
        if self.is_identifier and alike and self.num_given >= _MIN_IDENTIFIERS:
            return "identifier"
        short = self.num_letters <= _MAX_CATEGORY_LENGTH * self.num_given
        few = self.counts is not None and len(self.counts) <= MAX_CATEGORIES
        repeated = self.counts is not None and 2 * len(self.counts) <= self.num_given
        return "category" if short and few and repeated else "text"

    def summarise(self, name: str, num_records: int, *, show: bool) -> FieldSummary:
        trial, kind = self.trial, self.kind
        is_alike = trial.num_odd <= (1 - _MIN_LIKENESS) * self.num_given
        alike = is_alike and kind not in ("empty", "nested", "serial")
        return FieldSummary(
            name=name,
            kind=kind,
            num_empty=num_records - self.num_given,
            num_distinct=None if self.counts is None else len(self.counts),
            values=tuple(self.counts.most_common()) if show and self.counts else (),
            convert=trial.convert if kind in ("number", "date") else text,
            likeness=trial.likeness if alike else None,
            num_odd=trial.num_odd if alike else 0,
            first_odd=trial.first_odd if alike else "",
        )


def _add(columns: dict[str, _Column], row: Row) -> None:
    for name, value in row.fields.items():
        column = columns.setdefault(name, _Column())
        if not is_empty(value):
            column.add(value, row)


def _find_likely(columns: dict[str, _Column]) -> tuple[str, ...]:
    """Fields whose name or whose values look like territories, likeliest first."""
    scores: dict[str, int] = {}
    for name, column in columns.items():
        if column.counts is None or column.kind not in ("category", "text"):
            continue
        codes = all(is_territory_code(value) for value in column.counts)
        named = any(word in name.lower() for word in _LIKELY_NAMES)
        scores[name] = 2 * named + (codes and column.kind == "category")
    ordered = sorted((name for name in scores if scores[name]), key=lambda name: -scores[name])
    return tuple(ordered)


def is_territory_code(value: str) -> bool:
    """Whether it looks like an ISO 3166 code: `US`, `USA`, `US-CA`."""
    country, _, part = value.partition("-")
    known = country.isascii() and country.isalpha() and country.isupper() and len(country) in (2, 3)
    return known and len(part) <= 3 and (part.isalnum() or "-" not in value)
