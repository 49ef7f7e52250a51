"""What is in a raw input file, before anybody decides what to make of it."""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.sources import Row, SourceError, find_format, is_empty, number, read_rows, text
from data.sources import jurisdiction as name_jurisdiction

Kind = Literal["number", "category", "text", "identifier", "serial", "bytes", "empty"]
"""serial: whole numbers that only count the records, each one more than the one before.
category: texts of which there are few. identifier: another text in every record, all about as long,
without a space and with a digit. bytes: neither text nor number."""

MAX_CATEGORIES = 100
MAX_JURISDICTIONS = 250
_LIKELY_NAMES = ("jurisdiction", "country", "nation", "territory", "region", "state", "market")
_MAX_CATEGORY_LENGTH = 40
_MIN_IDENTIFIERS = 20
"""Fewer records may differ by chance."""
_MAX_IDENTIFIER_SPREAD = 4
"""Characters between the shortest and the longest: from `c1` to `c99999`."""
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
class _Column:
    num_given: int = 0
    num_letters: int = 0
    shortest: float = math.inf
    longest: int = 0
    is_text: bool = True
    is_number: bool = True
    is_serial: bool = True
    is_identifier: bool = True
    previous: float | None = None
    counts: Counter[str] | None = field(default_factory=Counter)
    """None once there are more than MAX_JURISDICTIONS."""

    def add(self, value: Any) -> None:
        self.num_given += 1
        if self.is_number:
            self._add_number(value)
        if self.is_text:
            self._add_text(value)

    def _add_number(self, value: Any) -> None:
        try:
            amount = number(value)
        except (ValueError, TypeError):
            self.is_number = self.is_serial = False
            return
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
    def kind(self) -> Kind:
        if not self.num_given:
            return "empty"
        if self.is_number:
            return "serial" if self.is_serial and self.num_given > 2 else "number"
        if not self.is_text:
            return "bytes"
        alike = self.longest - self.shortest <= _MAX_IDENTIFIER_SPREAD
        if self.is_identifier and alike and self.num_given >= _MIN_IDENTIFIERS:
            return "identifier"
        short = self.num_letters <= _MAX_CATEGORY_LENGTH * self.num_given
        few = self.counts is not None and len(self.counts) <= MAX_CATEGORIES
        repeated = self.counts is not None and 2 * len(self.counts) <= self.num_given
        return "category" if short and few and repeated else "text"

    def summarise(self, name: str, num_records: int, *, show: bool) -> FieldSummary:
        return FieldSummary(
            name=name,
            kind=self.kind,
            num_empty=num_records - self.num_given,
            num_distinct=None if self.counts is None else len(self.counts),
            values=tuple(self.counts.most_common()) if show and self.counts else (),
        )


def _add(columns: dict[str, _Column], row: Row) -> None:
    for name, value in row.fields.items():
        column = columns.setdefault(name, _Column())
        if not is_empty(value):
            column.add(value)


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


@dataclass(frozen=True)
class Survey:
    """What a workload's constants and sizes depend on."""

    num_records: dict[str, int]
    """By jurisdiction, most records first."""
    classes: frozenset[str]
    amounts: dict[str, "array[float]"]
    """The numbers to predict, by jurisdiction."""
    text_bytes: dict[str, "array[int]"]
    """Length of each record's texts together, in UTF-8 bytes, by jurisdiction."""


@dataclass
class _Gaps:
    """Records without a field that each must have."""

    name: str
    count: int = 0
    first: str = ""

    def add(self, row: Row) -> None:
        self.count += 1
        self.first = self.first or row.place

    def check(self, num_records: int, why: str) -> None:
        if self.count:
            raise SourceError(
                f"{self.first}: field '{self.name}' is empty, as in {self.count} of {num_records} "
                f"records: {why}. Fill it in, or leave those records out of the file"
            )


def survey_source(
    summary: SourceSummary,
    *,
    jurisdiction_field: str | None,
    jurisdiction: str | None,
    classes: str | None,
    amounts: str | None,
    texts: Sequence[str],
) -> Survey:
    """Read the file once more. Exactly one of jurisdiction_field and jurisdiction is not None.

    classes, amounts: the field to predict, as either of the two. texts: fields to measure.
    Raises SourceError when a record lacks a jurisdiction or a target, naming the first one.
    """
    counts: Counter[str] = Counter()
    names: set[str] = set()
    values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    text_bytes: defaultdict[str, array[int]] = defaultdict(lambda: array("L"))
    homeless, aimless = _Gaps(jurisdiction_field or ""), _Gaps(classes or amounts or "")
    for row in read_rows(summary.path):
        whose = jurisdiction or _read(row, jurisdiction_field, name_jurisdiction)
        if whose is None:
            homeless.add(row)
            continue
        counts[whose] += 1
        target = _read(row, amounts, number) if amounts else _read(row, classes, text)
        if target is None and (classes or amounts):
            aimless.add(row)
        elif classes:
            names.add(target)
        elif amounts:
            values[whose].append(target)
        if texts:
            given = [_read(row, name, text) for name in texts]
            text_bytes[whose].append(sum(len(t.encode("utf-8", "replace")) + 1 for t in given if t))
    homeless.check(summary.num_records, "whose law binds them is not known, so none has a place")
    aimless.check(summary.num_records, "there is nothing to learn from them")
    return Survey(dict(counts.most_common()), frozenset(names), dict(values), dict(text_bytes))


def _read(row: Row, name: str | None, convert: Callable[[Any], Any]) -> Any:
    """A field's value, converted; None where it is empty or cannot be."""
    value = None if name is None else row.fields.get(name)
    try:
        return None if is_empty(value) else convert(value)
    except ValueError:
        return None
