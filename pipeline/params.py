"""Changes values in params.yaml, comments and order kept: the file stays the truth of a run."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yaml import (
    CollectionNode,
    MappingNode,
    SafeLoader,
    YAMLError,
    compose,
    safe_dump,
    safe_load,
)

from pipeline.config import Config
from pipeline.errors import ConfigError


def set_params(path: Path, changes: Mapping[str, Any]) -> Config:
    """Write dotted names such as `train.steps` and give the new config.

    The file is replaced only when the result is valid. Raises ConfigError otherwise, which names
    the changes instead of a line: they are in no file.
    """
    Config.load(path)
    text = path.read_text(encoding="utf-8")
    for name, value in changes.items():
        text = _change(text, name, value, path)
    pending = path.with_suffix(".yaml.new")
    pending.write_text(text, encoding="utf-8")
    try:
        config = Config.load(pending)
        pending.rename(path)
    except ConfigError as error:
        changed = ", ".join(f"{name} = {_write(value)}" for name, value in changes.items())
        told = re.sub(rf"{re.escape(str(pending))}(:\d+)?", f"{path}", str(error))
        raise ConfigError(f"with {changed}, which was not written: {told}") from None
    finally:
        pending.unlink(missing_ok=True)
    return config


def parse_change(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, the value as in YAML. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--set {text}: write NAME=VALUE, for example train.steps=50")
    try:
        return name, safe_load(value)
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"--set {text}: the value is not YAML: {error}") from None


def _change(text: str, name: str, value: Any, path: Path) -> str:
    """The text with one value replaced or added, and no other byte changed."""
    node = compose(text, Loader=SafeLoader)
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, MappingNode):
            raise ConfigError(
                f"{path}: {name}: what stands above '{part}' is a list or a value: a single entry "
                "of it cannot be set, edit it in the file"
            )
        below = next((child for key, child in node.value if key.value == part), None)
        if below is None:
            for missing in reversed(parts[depth + 1 :]):
                value = {missing: value}
            return _insert(text, node, f"{part}: {_write(value)}")
        node = below
    assert node is not None  # a name has at least one part
    if isinstance(node, CollectionNode) and not node.flow_style:
        raise ConfigError(f"{path}: {name} is a section of several lines: edit it in the file")
    return text[: node.start_mark.index] + _write(value) + text[node.end_mark.index :]


def _insert(text: str, section: MappingNode, entry: str) -> str:
    """The entry as the first one of a section."""
    start = section.start_mark.index
    if section.flow_style:
        comma = ", " if section.value else ""
        return f"{text[: start + 1]}{entry}{comma}{text[start + 1 :]}"
    return f"{text[:start]}{entry}\n{' ' * section.start_mark.column}{text[start:]}"


def _write(value: Any) -> str:
    written: str = safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return written.removesuffix("...\n").strip()
