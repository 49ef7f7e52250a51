"""One sample and the territory whose law it is under: all of Convoy that a workload imports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """One sample.

    fields: named values of any type that Arrow can hold: text, bytes, numbers, lists, mappings.
    jurisdiction: the territory whose law binds the sample, for example "EU" or "US".
    """

    fields: Mapping[str, Any]
    jurisdiction: str
