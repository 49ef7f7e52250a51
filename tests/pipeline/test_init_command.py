"""`convoy init` as a command: it asks on a terminal, and says what to say elsewhere."""

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.workspaces import BIN

CSV = "country,age,answer\n" + "".join(
    f"{('DE', 'US', 'FR')[i % 3]},{20 + i % 50},{'yes' if i % 50 > 25 else 'no'}\n"
    for i in range(150)
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "people.csv"
    path.write_text(CSV)
    return path


def init(source: Path, *options: str, keys: str | None = None) -> tuple[int, str]:
    """Run the command beside the source; with keys on a terminal that types them."""
    command = [str(BIN / "convoy"), "init", "people", "--from", source.name, *options]
    if keys is None:
        done = subprocess.run(
            command, cwd=source.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return done.returncode, done.stdout + done.stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, cwd=source.parent, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    os.close(theirs)
    os.write(ours, keys.encode())
    output, _ = process.communicate(timeout=120)
    os.close(ours)
    return process.returncode, output.decode()


def test_it_says_which_fields_there_are_when_it_cannot_ask(source: Path) -> None:
    code, output = init(source)
    assert code == 1
    assert "error: people.csv" in output
    assert "--jurisdiction-field" in output
    assert "country, age, answer" in output
    assert not (source.parent / "people").exists()


def test_it_asks_on_a_terminal_and_offers_the_likely_field(source: Path) -> None:
    code, output = init(source, "--target", "answer", keys="\n")
    assert code == 0, output
    assert "DE (50)" in output
    params = (source.parent / "people" / "params.yaml").read_text()
    assert "jurisdictions: [DE]" in params
    assert (source.parent / "people" / "people.py").is_file()


def test_one_jurisdiction_for_all_can_be_typed(source: Path) -> None:
    code, output = init(source, keys="=CH\n")
    assert code == 0, output
    assert "jurisdictions: [CH]" in (source.parent / "people" / "params.yaml").read_text()


def test_a_bad_name_is_refused_before_anything_is_asked(source: Path) -> None:
    done = subprocess.run(
        [str(BIN / "convoy"), "init", "my-data", "--from", source.name],
        cwd=source.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "my_data" in done.stderr
