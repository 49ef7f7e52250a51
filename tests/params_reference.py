"""`python -m tests.params_reference` writes docs/params.md from what reads params.yaml."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config import Config

PAGE = Path(__file__).parent.parent / "docs" / "params.md"
_HEAD = """\
# All keys of params.yaml

Written from the code by `python -m tests.params_reference`; a test holds the two equal. A key that
is not named here, or a value of another type, is refused with its file and line. A key without a
default must be given; `*` stands for a name of yours, or for each entry of a list.

"""


def write_page() -> str:
    """The page, as Markdown."""
    return _HEAD + "\n".join(_sections("", Config)).rstrip() + "\n"


def _sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    """This section's table, and then those of the sections inside it."""
    told = _read_docstrings(model)
    inner: list[tuple[str, type[BaseModel]]] = []
    rows: list[str] = []
    for field, info in model.model_fields.items():
        name = info.alias or field
        below = _find_model(info.annotation)
        if below is not None:
            many = "" if below is info.annotation or _is_optional(info.annotation) else ".*"
            inner.append((f"{path}{name}{many}", below))
        # A region's name is its key.
        elif not (path == "regions.*." and name == "name"):
            rows.append(f"| `{name}` | {_write_default(info)} | {told.get(field, '')} |")
    purpose = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    yield f"## {path.removesuffix('.') or 'At the top'}\n\n{purpose}\n"
    if rows:
        yield "\n".join(("| key | default | what it is |", "|---|---|---|", *rows)) + "\n"
    for name, below in inner:
        yield from _sections(f"{name}.", below)


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds: alone, optional, in a list or by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for part in get_args(annotation) if (m := _find_model(part))), None)


def _is_optional(annotation: Any) -> bool:
    return type(None) in get_args(annotation)


def _write_default(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return ""
    written = {None: "null", True: "true", False: "false", (): "[]"}
    is_plain = isinstance(default, bool | tuple) or default is None
    return f"`{written[default] if is_plain and default in written else _plain(default)}`"


def _plain(default: Any) -> str:
    return str(list(default) if isinstance(default, tuple) else default)


def _read_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The string after each field of the class, and of the classes that it extends."""
    told: dict[str, str] = {}
    for base in reversed([c for c in model.__mro__ if c not in BaseModel.__mro__]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                told[field.target.id] = _read_string(after)
    return told


def _read_string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split()).replace("|", "\\|")
    return ""


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
