"""One sample and the territory whose law it is under: all of Convoy that a workload imports."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    """

    fields: Mapping[str, Any]
    jurisdiction: str
