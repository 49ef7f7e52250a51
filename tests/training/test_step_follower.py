"""Each logged step is passed on once, also when a resumed training cuts its log back."""

import json
from pathlib import Path

from training.step_follower import StepFollower


def write(path: Path, *steps: int) -> None:
    """As a training that is resumed does: another file in the place of the old one."""
    pending = path.with_suffix(".tmp")
    pending.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    pending.rename(path)


def test_steps_that_are_made_again_are_not_passed_on_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    seen: list[float] = []
    follower = StepFollower(path, lambda line: seen.append(line["step"]))
    follower.poll()
    write(path, 1, 2, 3)
    follower.poll()
    write(path, 1)
    follower.poll()
    write(path, 1, 2, 3, 4)
    follower.poll()
    with path.open("a") as file:
        file.write('{"step": 5}\n{"st')
    follower.poll()
    with path.open("a") as file:
        file.write('ep": 6}\n')
    follower.poll()
    assert seen == [1, 2, 3, 4, 5, 6]


def test_what_an_earlier_call_has_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, 1, 2, 3)
    seen: list[float] = []
    follower = StepFollower(path, lambda line: seen.append(line["step"]))
    write(path, 1, 2)
    follower.poll()
    write(path, 1, 2, 3, 4)
    follower.poll()
    assert seen == [4]
