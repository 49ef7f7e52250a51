"""Unions of countries whose law binds the records of all members: for now the European Union."""

from typing import Any

from data.sources import jurisdiction
from data.values import Convert

_MEMBERS = {
    "EU": (
        *("AT AUT Austria", "BE BEL Belgium", "BG BGR Bulgaria", "HR HRV Croatia", "CY CYP Cyprus"),
        *("CZ CZE Czechia|Czech Republic", "DK DNK Denmark", "EE EST Estonia", "FI FIN Finland"),
        *("FR FRA France", "DE DEU Germany", "GR GRC Greece", "HU HUN Hungary"),
        *("IE IRL Ireland", "IT ITA Italy", "LV LVA Latvia", "LT LTU Lithuania"),
        *(
            "LU LUX Luxembourg",
            "MT MLT Malta",
            "NL NLD Netherlands|The Netherlands",
            "PL POL Poland",
        ),
        *("PT PRT Portugal", "RO ROU Romania", "SK SVK Slovakia", "SI SVN Slovenia"),
        *("ES ESP Spain", "SE SWE Sweden"),
    )
}
"""Each by ISO 3166 codes and English names. Territories with a code of their own are none."""


def list_unions() -> tuple[str, ...]:
    """Names of the unions that are known."""
    return tuple(_MEMBERS)


def is_member(union: str, name: str) -> bool:
    """Whether a jurisdiction is a country of the union, by a code or by its English name."""
    return name in _CODES[union] or _fold(name) in _NAMES[union]


def list_names(union: str) -> tuple[str, ...]:
    """English names of the members."""
    return tuple(member.split(" ", 2)[2].split("|")[0] for member in _MEMBERS[union])


def member_of(union: str) -> Convert:
    """Reads a value as `jurisdiction` does, and the union's members as the union."""

    def jurisdiction_or_union(value: Any) -> str:
        name = jurisdiction(value)
        return union if is_member(union, name) else name

    return jurisdiction_or_union


def _fold(name: str) -> str:
    return name.replace("-", " ").replace("_", " ").casefold()


_CODES = {
    union: {code for member in members for code in member.split(" ", 2)[:2]}
    for union, members in _MEMBERS.items()
}
"""As they are written: `de` is more often a language than a country."""
_NAMES = {
    union: {_fold(name) for member in members for name in member.split(" ", 2)[2].split("|")}
    for union, members in _MEMBERS.items()
}
