"""Changes values in params.yaml, comments and order kept: the file stays the truth of a run."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError, safe_load

from pipeline.config import Config
from pipeline.errors import ConfigError


def set_params(path: Path, changes: Mapping[str, Any]) -> Config:
    """Write dotted names such as `train.steps` and give the new config.

    The file is replaced only when the result is valid. Raises ConfigError otherwise.
    """
    from ruamel.yaml import YAML

    Config.load(path)
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 100
    yaml.indent(mapping=2, sequence=4, offset=2)
    content = yaml.load(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        _set(content, name, value, path)
    text = io.StringIO()
    yaml.dump(content, text)
    pending = path.with_suffix(".yaml.new")
    pending.write_text(text.getvalue(), encoding="utf-8")
    try:
        config = Config.load(pending)
        pending.rename(path)
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(pending), str(path))) from None
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


def _set(content: Any, name: str, value: Any, path: Path) -> None:
    *sections, key = name.split(".")
    for section in sections:
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {name}: {section} is below a value, not a section")
        content = content.setdefault(section, {})
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: {name}: {key} is below a value, not a section")
    content[key] = value
