"""The house stands: imports run one way, libraries live at home, stage names agree."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.params_reference import PAGE, write_page

ROOT = Path(__file__).parent.parent
LINE = ("flows", "tasks", "pipeline", "planner", "training", "data", "storage")
HOMES = {
    "prefect": {"flows", "tasks"},
    "rich": {"flows"},
    "dvc": {"pipeline"},
    "yaml": {"pipeline"},
    "jinja2": {"pipeline"},
    "matplotlib": {"pipeline"},
    "torch": {"training"},
    "torchft": {"training"},
    "mlflow": {"training"},
    "safetensors": {"training"},
    "pyarrow": {"data"},
    "obstore": {"storage"},
    "boto3": {"storage"},
    "botocore": {"storage"},
    "cryptography": {"storage"},
    "hvac": {"storage"},
}
HEAVY = (
    *(
        "torch",
        "torchft",
        "prefect",
        "mlflow",
        "dvc",
        "pyarrow",
        "numpy",
        "matplotlib",
        "boto3",
        "hvac",
    ),
    *("requests", "cryptography"),
)


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def sources(package: str) -> list[Path]:
    files = [p for p in (ROOT / package).rglob("*.py") if "templates" not in p.parts]
    assert files
    return files


@pytest.mark.parametrize("package", LINE)
def test_imports_run_one_way(package: str) -> None:
    forbidden = set(LINE[: LINE.index(package)]) | {"examples", "tests", "benchmarks"}
    for path in sources(package):
        assert not imports(path) & forbidden, path


@pytest.mark.parametrize("package", LINE)
def test_libraries_live_at_home(package: str) -> None:
    foreign = {library for library, homes in HOMES.items() if package not in homes}
    for path in sources(package):
        assert not imports(path) & foreign, path


def test_examples_import_of_convoy_the_record_alone() -> None:
    for path in sources("examples"):
        assert not imports(path) & (set(LINE) - {"data"}), path
        text = path.read_text(encoding="utf-8")
        assert all(
            line.startswith("from data.record import")
            for line in text.splitlines()
            if line.startswith(("from data", "import data"))
        ), path


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split()) if done.stdout.strip() else set()


def test_stages_load_no_heavy_library() -> None:
    assert loaded_after("import pipeline.stages") == set()


def test_the_command_line_loads_no_heavy_library() -> None:
    parse = "import flows.cli\ntry:\n    flows.cli.main(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_after(parse) == set()


def test_loading_is_seen_when_it_happens() -> None:
    assert "numpy" in loaded_after("import numpy")


def test_names_of_the_stages_agree() -> None:
    from flows.arguments import _STAGES
    from pipeline.config import Config
    from pipeline.stages import STAGES
    from tasks.stages import TASKS

    dvc = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    params = yaml.safe_load((ROOT / "params.yaml").read_text())
    names = list(STAGES)
    assert names == list(TASKS) == list(dvc) == list(_STAGES)
    assert [name for name in params if name in names] == names
    fields = {field.alias or name for name, field in Config.model_fields.items()}
    assert set(names) <= fields
    for name, stage in STAGES.items():
        assert TASKS[name].fn is stage
        assert TASKS[name].name == name
        assert dvc[name]["cmd"] == f"convoy stage {name}"


def test_the_readme_names_every_source_file() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for package in (*LINE, "examples", "benchmarks"):
        for path in sources(package):
            if path.name != "__init__.py":
                assert path.name in readme, path


def test_the_page_of_parameters_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page(), "python -m tests.params_reference"


def test_the_project_speaks_of_itself_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    words = ["sub" + "agent", "/wo" + "rk/", "pypi" + ".org"]
    for name in filter(None, listed):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ""} and path.is_file():
            text = path.read_text(encoding="utf-8")
            assert not [word for word in words if word in text], path
