"""A sample of the cases of `make tamper`: every change of what is stored is refused."""

from pathlib import Path

from tests.tamper import REFUSED, WAYS, run_cases, run_log_cases


def test_a_sample_of_random_damage_is_refused(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, 400, seed=20261130)
    assert {outcome for _, _, outcome in outcomes} == {REFUSED}, outcomes
    seen = {(kind, way) for kind, way, _ in outcomes}
    assert seen == {(kind, way) for kind in ("shard", "envelope", "manifest") for way in WAYS}


def test_a_sample_of_random_damage_to_the_log_is_refused(tmp_path: Path) -> None:
    assert {outcome for _, _, outcome in run_log_cases(tmp_path / "log", 60, seed=1)} == {REFUSED}
