"""Progress on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from flows import console
from pipeline.progress import report


def tell() -> None:
    report("shard", 0, None, "", "params.yaml changed")
    report("shard", 1_000, None, "records")
    report("shard", 1_234, 1_234, "records")
    report("shard", 0, 0, "", "done in 1.0 s")
    report("train", 0, None, "", "forced")
    for step in range(1, 101):
        report("train", step, 100, "steps", f"loss {1 / step:.2f}")
    report("evaluate", 0, 0, "", "up to date")


def test_a_log_gets_plain_lines_and_not_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "console", Console(file=io.StringIO(), force_terminal=False))
    with console.show_progress():
        tell()
    assert capsys.readouterr().err == (
        "shard: params.yaml changed\n"
        "shard: 1,234/1,234 records\n"
        "shard: done in 1.0 s\n"
        "train: forced\n"
        "train: 100/100 steps, loss 0.01\n"
        "evaluate: up to date\n"
    )


def test_what_goes_on_is_said_at_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal, said in ((True, "starting Prefect ...\n"), (False, "")):
        file = io.StringIO()
        fake = Console(file=file, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(console, "console", fake)
        console.say("starting Prefect")
        assert file.getvalue() == said


def test_a_terminal_gets_a_bar_for_each_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(console, "console", terminal)
    with console.show_progress():
        tell()
    last = screen.getvalue().rsplit("\r", 1)[-1]
    shard, train, evaluate = [line for line in last.splitlines() if "━" in line]
    assert "    shard ━" in shard
    assert "1,234/1,234 records" in shard
    assert "done in 1.0 s" in shard
    assert "100/100 steps" in train
    assert "loss 0.01" in train
    assert "up to date" in evaluate
    assert capsys.readouterr() == ("", "")
