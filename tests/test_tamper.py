"""A sample of the cases of `make tamper`: every change of what is stored is refused."""

from pathlib import Path

from tests.tamper import REFUSED, WAYS, run_cases


def test_a_sample_of_random_damage_is_refused(tmp_path: Path) -> None:
    outcomes = run_cases(tmp_path, 400, seed=20261130)
    assert {outcome for _, _, outcome in outcomes} == {REFUSED}, outcomes
    seen = {(kind, way) for kind, way, _ in outcomes}
    assert seen == {(kind, way) for kind in ("shard", "envelope", "manifest") for way in WAYS}
