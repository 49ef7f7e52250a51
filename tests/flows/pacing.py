"""A toy workload whose steps last as long as a test wants, without any CPU for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.workspaces import Workspace

_FAST = "    return cross_entropy(output, target)"
_PACED = f"""
    pace = Path(__file__).with_name(".convoy") / "pace"
    if pace.exists():
        time.sleep(float(pace.read_text()))
{_FAST}"""


@dataclass(frozen=True)
class Pace:
    """How fast the trainings of a workspace go, those at work too."""

    path: Path

    def slow(self, seconds: float = 0.2) -> None:
        """So many more for each computation of the loss."""
        pending = self.path.with_suffix(".new")
        pending.write_text(str(seconds))
        pending.rename(self.path)

    def free(self) -> None:
        """As fast as they can."""
        self.path.unlink(missing_ok=True)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Slow in a block, and free after it."""
        self.slow()
        try:
            yield
        finally:
            self.free()


def make_paced(workspace: Workspace) -> Pace:
    """Have the toy workload of a workspace heed a pace."""
    code = workspace.path / "toy_workload.py"
    text = code.read_text()
    assert _FAST in text
    text = text.replace("import csv\n", "import csv\nimport time\n")
    code.write_text(text.replace(_FAST, _PACED))
    pace = find_pace(workspace)
    pace.path.parent.mkdir(mode=0o700, exist_ok=True)
    return pace


def find_pace(workspace: Workspace) -> Pace:
    """The pace that the paced workload of a workspace heeds."""
    return Pace(workspace.path / ".convoy" / "pace")
