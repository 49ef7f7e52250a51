"""The text of a YAML file such as params.yaml: its values, and the line of each for an error."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import yaml

Loc = tuple[Any, ...]
"""Keys and list indices, from the top of the file down to a value."""

_MAX_INTEGER = 2**53 - 1
"""Beyond it canonical JSON (RFC 8785) has no one form, and digests of the parameters need one."""


@dataclass(frozen=True)
class ParamsFile:
    """A params.yaml, or another mapping, that JSON can say as well."""

    path: Path
    content: dict[str, Any]
    lines: dict[Loc, int]
    """The line, from 1, of every key and list item."""

    def complain(self, loc: Loc, message: str) -> str:
        """`FILE:LINE: FIELD: message`, the line of the nearest key that is there."""
        line = next(
            (self.lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in self.lines), 0
        )
        place = f"{self.path}:{line}" if line else str(self.path)
        field = ".".join(str(part) for part in loc)
        return f"{place}: {field}: {message}" if field else f"{place}: {message}"


def find_rules(file: ParamsFile) -> dict[str, str]:
    """`FILE:LINE` of each residency rule, by its name, in a file that is a valid configuration."""
    rules = file.content["residency"].get("rules", [])
    return {
        rule["name"]: f"{file.path}:{file.lines['residency', 'rules', index]}"
        for index, rule in enumerate(rules)
    }


def read_params_file(path: Path) -> ParamsFile:
    """Read a params.yaml. Raises ConfigError as `read_mapping`."""
    return read_mapping(
        path,
        "run this in a workspace, or make one with `convoy init NAME --from FILE`",
        "sections: dataset, workload, regions, ...",
    )


def read_mapping(path: Path, if_missing: str, of_what: str) -> ParamsFile:
    """Read a YAML file that holds a mapping, of what an error says. Raises ConfigError, with the
    line, for what is not YAML, for a key that is there twice, and for values that YAML can say and
    JSON, DVC or a digest cannot.
    """
    import yaml

    text = _read_text(path, if_missing)
    try:
        content = yaml.load(text, Loader=yaml.CSafeLoader)
        lines, repeated = _find_lines(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        what = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}:{line}: not YAML: {what}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # An impossible date such as 2035-02-30 is a bare ValueError of the YAML library.
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a mapping of {of_what}")
    file = ParamsFile(path, content, lines)
    for loc in repeated:
        raise ConfigError(file.complain(loc, "the key is there twice: remove one"))
    _refuse(file, content, ())
    return file


def _read_text(path: Path, if_missing: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {if_missing}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8: save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror})") from None


def _refuse(file: ParamsFile, value: Any, loc: Loc) -> None:
    problem = None
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                problem = f"put the key in quotes: '{key}'"
            _refuse(file, inner, (*loc, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse(file, inner, (*loc, index))
    elif isinstance(value, float) and not math.isfinite(value):
        problem = "must be a finite number"
    elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
        problem = f"must not be larger than {_MAX_INTEGER}"
    elif value is not None and not isinstance(value, str | int | float):
        # For one: DVC, which reads the file too, stops at a bare date with an internal error.
        problem = f'put the {type(value).__name__} in quotes: "{value}"'
    if problem:
        raise ConfigError(file.complain(loc, problem))


def _find_lines(text: str) -> tuple[dict[Loc, int], list[Loc]]:
    """The line of every key and list item, and the keys that are there twice."""
    import yaml

    lines: dict[Loc, int] = {}
    repeated: list[Loc] = []

    def walk(node: "yaml.Node", loc: Loc) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                place = (*loc, key.value)
                if place in lines:
                    repeated.append(place)
                lines[place] = key.start_mark.line + 1
                walk(value, place)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*loc, index)] = value.start_mark.line + 1
                walk(value, (*loc, index))

    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    if root is not None:
        walk(root, ())
    return lines, repeated
