"""What a workload's constants and sizes depend on, read from a raw input file."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.sources import Row, SourceError, read_rows
from data.values import Convert, is_empty, number, text
from pipeline.inspection import SourceSummary


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
    or_else: str = ""
    count: int = 0
    first: str = ""

    def add(self, row: Row) -> None:
        self.count += 1
        self.first = self.first or row.place

    def check(self, num_records: int, why: str) -> None:
        if self.count:
            raise SourceError(
                f"{self.first}: field '{self.name}' is empty{self.or_else}, as in {self.count} of "
                f"{num_records} records: {why}. Fill it in, or leave those records out of the file"
            )


def survey_source(
    summary: SourceSummary,
    *,
    jurisdiction_field: str | None,
    jurisdiction: str | None,
    name_jurisdiction: Convert,
    classes: str | None,
    amounts: str | None,
    texts: Sequence[str],
) -> Survey:
    """Read the file once more. Exactly one of jurisdiction_field and jurisdiction is not None.

    name_jurisdiction: makes one of a value of the field. classes, amounts: the field to predict,
    as either of the two. texts: fields to measure.
    Raises SourceError when a record lacks a jurisdiction or a target, naming the first one.
    """
    counts: Counter[str] = Counter()
    names: set[str] = set()
    values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))
    text_bytes: defaultdict[str, array[int]] = defaultdict(lambda: array("L"))
    homeless = _Gaps(jurisdiction_field or "")
    aimless = _Gaps(classes or amounts or "", " or holds no number" if amounts else "")
    read_amount = summary.find(amounts, "--target").convert if amounts else number
    for row in read_rows(summary.path):
        whose = jurisdiction or _read(row, jurisdiction_field, name_jurisdiction)
        if whose is None:
            homeless.add(row)
            continue
        counts[whose] += 1
        target = _read(row, amounts, read_amount) if amounts else _read(row, classes, text)
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
    return Survey(
        num_records=dict(counts.most_common()),
        classes=frozenset(names),
        amounts=dict(values),
        text_bytes=dict(text_bytes),
    )


def _read(row: Row, name: str | None, convert: Convert) -> Any:
    """A field's value, converted; None where it is empty or cannot be."""
    value = None if name is None else row.fields.get(name)
    try:
        return None if is_empty(value) else convert(value)
    except (ValueError, TypeError, OverflowError):
        return None
