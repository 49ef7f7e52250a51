"""The name of a place in its country's own script."""

import difflib
import unicodedata
from collections.abc import Sequence

# Countries, the scripts a name of theirs is written in (as Unicode names them), and a character set
# that tells their own letters from a neighbour's: Japanese from Chinese characters, for one.
# India writes in many scripts; Devanagari is that of the union's official language.
_SCRIPTS = (
    ("CN", "CJK", "gb2312"),
    ("HK MO TW", "CJK", "big5"),
    ("JP", "CJK HIRAGANA KATAKANA", "shift_jis"),
    ("KP KR", "HANGUL", "utf-8"),
    ("RU", "CYRILLIC", "koi8-r"),
    ("UA", "CYRILLIC", "koi8-u"),
    ("BG BY MK RS", "CYRILLIC", "iso8859-5"),
    ("KG KZ MN TJ", "CYRILLIC", "utf-8"),
    ("CY GR", "GREEK", "iso8859-7"),
    ("AM", "ARMENIAN", "utf-8"),
    ("GE", "GEORGIAN", "utf-8"),
    ("IL", "HEBREW", "iso8859-8"),
    ("AE BH DZ EG IQ JO KW LB LY MA OM PS QA SA SD SY TN YE", "ARABIC", "iso8859-6"),
    ("AF IR PK", "ARABIC", "utf-8"),
    ("IN NP", "DEVANAGARI", "utf-8"),
    ("BD", "BENGALI", "utf-8"),
    ("LK", "SINHALA", "utf-8"),
    ("TH", "THAI", "iso8859-11"),
    ("LA", "LAO", "utf-8"),
    ("MM", "MYANMAR", "utf-8"),
    ("KH", "KHMER", "utf-8"),
    ("BT", "TIBETAN", "utf-8"),
    ("MV", "THAANA", "utf-8"),
    ("ER ET", "ETHIOPIC", "utf-8"),
)
_SCRIPT_OF = {
    country: (frozenset(scripts.split()), charset)
    for countries, scripts, charset in _SCRIPTS
    for country in countries.split()
}
# GeoNames has most places of these two in Russian as well: a name that Russian letters can write
# counts for less than one that they cannot.
_RUSSIAN_TOO = frozenset({"BY", "UA"})
_DOUBT = 0.8
# Beijing is also called Beijing-city: there the part is the name, and the whole a variant of it.
_CITY_IS_A_SUFFIX = frozenset({"CJK", "HANGUL"})


def own_name(country: str, alternate_names: Sequence[str]) -> str:
    """The name in the country's own script, or "" where GeoNames has none.

    GeoNames gives the spellings without their languages. Of those in the country's script the one
    most like all the others is chosen, since variants gather round the name they vary: a guess,
    and now and then a neighbour's spelling.
    """
    if country not in _SCRIPT_OF:
        return ""
    scripts, charset = _SCRIPT_OF[country]
    names = [
        name for name in alternate_names if _is_in(name, scripts) and _can_write(charset, name)
    ]

    def likeness(name: str) -> float:
        doubt = _DOUBT if country in _RUSSIAN_TOO and _can_write("koi8-r", name) else 1.0
        return doubt * sum(_ratio(name, other, scripts) for other in names)

    return min(names, key=lambda name: (-likeness(name), len(name), name), default="")


def _is_in(name: str, scripts: frozenset[str]) -> bool:
    letters = [letter for letter in name if letter.isalpha()]
    # A Unicode name begins with its script: "CYRILLIC SMALL LETTER A", "CJK UNIFIED IDEOGRAPH-..."
    return bool(letters) and all(unicodedata.name(x, "").split(" ")[0] in scripts for x in letters)


def _can_write(charset: str, name: str) -> bool:
    try:
        name.encode(charset)
    except UnicodeEncodeError:
        return False
    return True


def _ratio(name: str, other: str, scripts: frozenset[str]) -> float:
    if scripts & _CITY_IS_A_SUFFIX and name in other:
        return 1.0
    return difflib.SequenceMatcher(None, name, other, False).ratio()
