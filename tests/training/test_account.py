"""What a run went through, and where its time went; by a clock that the test moves."""

from pathlib import Path

import pytest

from training.account import Account
from training.goodput import Stretch, measure_goodput
from training.heartbeat import Heartbeat
from training.incidents import Incident, Notice


class Clock:
    """The machine's clocks, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.time", lambda: self.now + 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def incident(last_step: int) -> Incident:
    return Incident(cause="killed", rank=0, message="", last_step=last_step, seconds=0.0)


def shape(account: Account) -> list[tuple[str, float, float]]:
    return [(s.kind, s.begins, s.ends) for s in account.stretches]


def test_the_time_is_a_row_of_stretches_without_gaps(clock: Clock) -> None:
    account = Account(lambda event: None)
    clock.now = 1003.0
    account.follow(1, 1, 1003.0)
    account.follow(1, 20, 1013.0)
    clock.now = 1014.0
    account.add(incident(last_step=20))
    clock.now = 1015.0
    account.add(incident(last_step=0))  # a start that came to no step
    clock.now = 1018.0
    account.follow(16, 16, 1018.0)
    account.follow(16, 40, 1030.0)
    clock.now = 1032.0
    account.end()
    assert shape(account) == [
        ("starting", 0.0, 3.0),
        ("training", 3.0, 13.0),
        ("recovering", 13.0, 18.0),
        ("training", 18.0, 30.0),
        ("ending", 30.0, 32.0),
    ]
    first, second = account.incidents
    assert (first.steps_lost, second.steps_lost) == (0, 4)
    assert (first.seconds_lost, second.seconds_lost) == (2.0, 3.0)
    steps = [
        {"step": 10, "data_wait_seconds": 0.1, "checkpoint_seconds": 0.0},
        {"step": 40, "data_wait_seconds": 0.0, "checkpoint_seconds": 0.05},
    ]
    goodput = measure_goodput(account.stretches, steps)
    assert goodput.lost_seconds == pytest.approx(10.0 * 4 / 20)
    assert goodput.data_wait_seconds == pytest.approx(1.0)
    assert goodput.checkpoint_seconds == pytest.approx(1.5)
    assert goodput.recovery_seconds == pytest.approx(5.0)
    assert goodput.starting_seconds == pytest.approx(5.0)
    assert goodput.total_seconds == pytest.approx(32.0)
    assert goodput.ratio == pytest.approx((22.0 - 2.0 - 1.0 - 1.5) / 32.0)


def test_to_grow_is_no_incident_and_takes_time(clock: Clock) -> None:
    account = Account(lambda event: None)
    account.follow(1, 9, 1004.0)
    clock.now = 1005.0
    account.tell_growth("two nodes again")
    clock.now = 1007.0
    account.follow(10, 10, 1007.0)
    [notice] = account.notices
    assert notice.seconds_lost == 3.0
    assert account.incidents == ()
    assert [kind for kind, _, _ in shape(account)] == [
        "starting",
        "training",
        "recovering",
        "training",
    ]


def test_a_call_after_one_that_was_killed_goes_on_with_its_account(
    clock: Clock, tmp_path: Path
) -> None:
    account = Account(lambda event: None, tmp_path)
    clock.now = 1002.0
    account.follow(1, 1, 1002.0)
    beat = Heartbeat(tmp_path, 0)
    beat.begin_step(1)
    clock.now = 1010.0
    beat.begin_step(30)
    account.follow(1, 30, 1010.0)
    clock.now = 1100.0  # nobody said good-bye
    told: list[Incident | Notice] = []
    again = Account(told.append, tmp_path)
    [killed] = told
    assert isinstance(killed, Incident)
    assert killed.last_step == 30
    assert "ended in step 30, and trains again 90 s later" in killed.message
    assert again.num_restarts == 0, "it counts against no budget of this call"
    clock.now = 1104.0
    again.follow(21, 21, 1104.0)
    again.end()
    assert shape(again)[:3] == [
        ("starting", 0.0, 2.0),
        ("training", 2.0, 10.0),
        ("recovering", 10.0, 104.0),
    ]
    [killed] = again.incidents
    assert (killed.steps_lost, killed.seconds_lost) == (9, 94.0)
    assert again.stretches[1].lost_steps == 9


def test_the_time_between_two_calls_in_order_is_no_part_of_the_run(
    clock: Clock, tmp_path: Path
) -> None:
    account = Account(lambda event: None, tmp_path)
    account.follow(1, 8, 1004.0)
    clock.now = 1005.0
    account.end()
    clock.now = 5000.0
    again = Account(lambda event: None, tmp_path)
    clock.now = 5002.0
    again.follow(9, 9, 5002.0)
    again.end()
    assert again.incidents == ()
    assert shape(again) == [
        ("starting", 0.0, 4.0),
        ("training", 4.0, 4.0),
        ("ending", 4.0, 5.0),
        ("starting", 5.0, 7.0),
        ("training", 7.0, 7.0),
        ("ending", 7.0, 7.0),
    ]


def test_what_the_log_says_beyond_the_stretches_makes_nothing_negative() -> None:
    stretches = [Stretch(kind="training", begins=0.0, ends=1.0, first_step=1, last_step=2)]
    goodput = measure_goodput(stretches, [{"step": 2, "data_wait_seconds": 3.0}])
    assert goodput.training_seconds == 0.0
    assert goodput.total_seconds == pytest.approx(1.0)
