"""A new workspace on disk: its name, its files from templates, its git and DVC repositories."""

import json
import keyword
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import VersioningError, WorkspaceError

_TEMPLATES = Path(__file__).with_name("templates")
_LINE_LENGTH = 100


def check_name(parent: Path, name: str) -> Path:
    """Where the workspace will be.

    Raises WorkspaceError unless the name can be a new folder, a dataset and a module.
    """
    root = parent / name
    proposal = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower() or "my_data"
    if proposal[0].isdigit() or keyword.iskeyword(proposal):
        proposal = f"data_{proposal}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or keyword.iskeyword(name):
        raise WorkspaceError(
            f"NAME: '{name}' cannot name a Python module: letters, digits and '_', a letter "
            f"first; for example {proposal}"
        )
    if name in sys.stdlib_module_names or _is_installed(name):
        raise WorkspaceError(
            f"NAME: '{name}' is already the name of a Python module: choose another, "
            f"for example my_{name}"
        )
    if root.exists() and not (root.is_dir() and not any(root.iterdir())):
        raise WorkspaceError(
            f"{root} is already there, and nothing is overwritten: choose another NAME, "
            "or move it away"
        )
    return root


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # A folder without code, such as an empty one of this name, also has a spec.
    return spec is not None and spec.origin is not None


def write_files(root: Path, name: str, template: str, context: Mapping[str, Any]) -> None:
    """Render the module from `template`, and all that stands beside it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined)
    environment.filters["yaml"] = _to_yaml
    environment.globals["assign"] = assign
    for file, origin in (
        (f"{name}.py", template),
        ("params.yaml", "params.yaml.j2"),
        ("README.md", "README.md.j2"),
    ):
        content = environment.get_template(origin).render(context)
        (root / file).write_text(content.rstrip("\n") + "\n", encoding="utf-8")
    for file, origin in (("dvc.yaml", "dvc.yaml"), (".gitignore", "gitignore")):
        (root / file).write_bytes((_TEMPLATES / origin).read_bytes())


def _to_yaml(value: str) -> str:
    """A scalar, quoted where it must be: a bare NO is false."""
    from yaml import safe_dump

    dumped: str = safe_dump([value], default_flow_style=True, allow_unicode=True, width=10_000)
    return dumped.strip()[1:-1]


def assign(name: str, value: str | tuple[str, ...]) -> str:
    """A constant in Python, laid out as a formatter would."""
    if isinstance(value, str):
        return f"{name} = {_quote(value)}"
    items = [_quote(item) for item in value]
    comma = "," if len(items) == 1 else ""
    line = f"{name}: tuple[str, ...] = ({', '.join(items)}{comma})"
    if len(line) <= _LINE_LENGTH:
        return line
    listed = "".join(f"    {item},\n" for item in items)
    return f"{name}: tuple[str, ...] = (\n{listed})"


@dataclass(frozen=True)
class Origin:
    """The Convoy that writes a workspace."""

    version: str
    checkout: Path | None
    """Where its code lies, if it is a checkout and not an installed wheel."""
    environment: Path | None
    """The virtual environment that it runs in."""


def read_origin() -> Origin:
    """What made the workspace, for its README."""
    folder = Path(__file__).resolve().parents[1]
    return Origin(
        version=version("convoy"),
        checkout=folder if (folder / "pyproject.toml").is_file() else None,
        environment=Path(sys.prefix) if sys.prefix != sys.base_prefix else None,
    )


def _quote(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def start_versioning(root: Path, message: str) -> bool:
    """git init, dvc init and a first commit; false when git knows no user and did not commit.

    Raises VersioningError without git.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    logging.getLogger("dvc").setLevel(logging.WARNING)
    if _git(root, "init", "--quiet"):
        raise VersioningError(f"`git init` failed in {root.parent}: is git installed?")
    try:
        with Repo.init(str(root)) as repo, repo.config.edit() as config:
            config["core"]["analytics"] = False
    except DvcException as error:
        raise VersioningError(f"`dvc init` failed in {root.parent}: {error}") from error
    (root / ".dvcignore").write_bytes((_TEMPLATES / "dvcignore").read_bytes())
    _git(root, "add", "--all")
    # Without this git invents an address from the machine's name.
    return not _git(root, "-c", "user.useConfigOnly=true", "commit", "--quiet", "-m", message)


def _git(root: Path, *arguments: str) -> int:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=root,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            check=False,
        ).returncode
    except FileNotFoundError:
        raise VersioningError("git is not installed: Convoy and DVC need it") from None
