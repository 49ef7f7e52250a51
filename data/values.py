"""Values of raw input files as numbers, texts and days.

Nothing of Convoy is imported here: the registered model carries this module beside the workload, so
that a row is read when it is served as its like were read in training.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from typing import Any

Convert = Callable[[Any], Any]

_NOT_GIVEN = frozenset({"na", "n/a", "nan", "null", "none", "?"})
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+(e[+-]?\d+)?", re.IGNORECASE)
_DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d.*)?")
_SECONDS_PER_DAY = 86_400


def read_fields(fields: Mapping[str, Any], types: Mapping[str, Convert]) -> dict[str, Any]:
    """The fields that `types` names, each converted; None for an empty or absent one.

    Raises ValueError naming the field, never the value.
    """
    return {name: read_field(fields, name, convert) for name, convert in types.items()}


def read_field(fields: Mapping[str, Any], name: str, convert: Convert) -> Any:
    """One field, converted. Raises ValueError naming the field, never the value."""
    value = fields.get(name)
    if is_empty(value):
        return None
    try:
        return convert(value)
    except (ValueError, TypeError, OverflowError):
        # What was raised would quote the value.
        if isinstance(convert, OneOf):
            raise ValueError(f"field '{name}' is {convert.refusal}") from None
        remedy = "correct it, or read the field as text"
        raise ValueError(f"field '{name}' is no {convert.__name__}: {remedy}") from None


def is_empty(value: Any) -> bool:
    """Whether a value says nothing: null, blank or not a number."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float | datetime) and value != value)


def number(value: Any) -> float | None:
    """A finite number; None for NA, NaN, null, none and `?`. Raises ValueError."""
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in _NOT_GIVEN:
            return None
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        raise ValueError
    result = float(value)
    if math.isinf(result):
        raise ValueError
    return None if math.isnan(result) else result


def comma_number(value: Any) -> float | None:
    """A number whose decimal point is a comma, as in 127,3, or is written as `number` reads it.
    Raises ValueError."""
    if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
        value = value.replace(",", ".")
    return number(value)


def days(value: Any) -> float | None:
    """Days since the first of January 1970, of a date, a time with a date, or either as ISO 8601
    writes it; without a zone UTC is meant. None as for `number`. Raises ValueError."""
    if isinstance(value, str):
        value = value.strip()
        if value.lower() in _NOT_GIVEN:
            return None
        if not _DATE.fullmatch(value):
            raise ValueError
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        moment = value if value.tzinfo else value.replace(tzinfo=UTC)
        return moment.timestamp() / _SECONDS_PER_DAY
    if not isinstance(value, date):
        raise ValueError
    return float(value.toordinal() - date(1970, 1, 1).toordinal())


def text(value: Any) -> str:
    """Any value as text: lists and mappings as JSON, 3.0 as 3. Raises ValueError for bytes that are
    not UTF-8."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, bytes):
        return value.decode("utf-8").strip()
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, sort_keys=True, default=text)
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


class OneOf:
    """Reads a value as one of some known texts. Raises ValueError for another one."""

    def __init__(self, known: tuple[str, ...], name: str) -> None:
        """name: of the constant that lists them, for the error."""
        self._known = frozenset(known)
        listed = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        self.refusal = f"none of {listed}, but another value: correct it, or add it to {name}"

    def __call__(self, value: Any) -> str:
        words = text(value)
        if words not in self._known:
            raise ValueError
        return words


def or_missing(convert: Convert) -> Convert:
    """The same, but a value that cannot be converted counts as missing."""

    def convert_or_none(value: Any) -> Any:
        try:
            return convert(value)
        except (ValueError, TypeError, OverflowError):
            return None

    return convert_or_none
