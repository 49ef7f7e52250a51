"""Records that left their jurisdiction are counted by year, and limits hold."""

import stat
from datetime import date
from pathlib import Path

import pytest

from data.crossings import (
    Crossing,
    Crossings,
    check_limits,
    find_crossings,
    find_new,
    read_crossings,
)
from data.errors import ResidencyError
from data.manifest import Manifest
from data.residency import Residency
from tests.data.test_residency import rule, shard
from tests.storage.conftest import file_region

REGIONS = [file_region(Path("/nonexistent"), name) for name in ("eu", "us", "cn")]
POLICY = Residency(
    rules=(
        rule("eu", ("EU",), ("eu",)),
        rule("us", ("US",), ("us", "eu", "cn"), yearly_limit=25),
        rule("cn", ("CN",), ("cn",)),
    )
)
DAY = date(2026, 3, 1)


def manifest(dataset: str, num_records: int) -> Manifest:
    return Manifest(dataset=dataset, shards=(shard("EU", 100), shard("US", num_records)))


def cross(before: Crossings, of: Manifest, day: date = DAY) -> Crossings:
    return before.add(find_new(find_crossings(of, REGIONS, POLICY, day), before))


def test_what_leaves_home_counts_once_a_version() -> None:
    once = cross(Crossings(), manifest("a", 10))
    assert [(c.region, c.num_records) for c in once.crossings] == [
        ("eu", {"us": {"US": 10}}),
        ("cn", {"us": {"US": 10}}),
    ]
    assert once.count(2026) == {"US": 10}
    assert cross(once, manifest("a", 10)) == once
    twice = cross(once, manifest("b", 12))
    assert twice.count(2026) == {"US": 22}
    assert twice.count(2025) == {}


def test_a_region_that_is_added_later_adds_no_people() -> None:
    before = Crossings().add(find_crossings(manifest("a", 10), REGIONS[:2], POLICY, DAY))
    after = cross(before, manifest("a", 10))
    assert len(after.crossings) == 2
    assert after.count(2026) == {"US": 10}


def test_a_version_placed_again_after_its_key_was_shredded_counts_in_its_year() -> None:
    of = manifest("a", 10)
    shredded = cross(Crossings(), of).mark_shredded(of.digest, "eu")
    again = cross(shredded, of, date(2027, 1, 1))
    assert [(c.region, c.day.year) for c in again.crossings[2:]] == [("eu", 2027)]
    assert (again.count(2026), again.count(2027)) == ({"US": 10}, {"US": 10})


def test_a_yearly_limit_ends_with_the_year() -> None:
    counted = cross(cross(Crossings(), manifest("a", 10)), manifest("b", 15))
    assert not check_limits(counted, POLICY, 2026)
    over = cross(counted, manifest("c", 1))
    assert "25 records of a jurisdiction" in check_limits(over, POLICY, 2026)["us"]
    assert "26 of US would have left in 2026" in check_limits(over, POLICY, 2026)["us"]
    next_year = cross(counted, manifest("c", 1), date(2027, 1, 1))
    assert not check_limits(next_year, POLICY, 2027)


def test_the_file_is_private_canonical_and_refused_when_edited(tmp_path: Path) -> None:
    path = tmp_path / "state" / "crossings.json"
    assert read_crossings(path) == Crossings()
    counted = cross(Crossings(), manifest("a", 10))
    counted.write(path)
    content = path.read_bytes()
    assert read_crossings(path) == counted
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read_crossings(path).write(path)
    assert path.read_bytes() == content
    path.write_bytes(content.replace(b"10", b"-1"))
    with pytest.raises(ResidencyError, match=r"crossings\.json is not what Convoy wrote"):
        read_crossings(path)


def test_a_crossing_says_its_rule() -> None:
    [crossing, _] = find_crossings(manifest("a", 10), REGIONS, POLICY, DAY)
    assert crossing == Crossing(
        day=DAY,
        dataset="a",
        version=manifest("a", 10).digest,
        region="eu",
        num_records={"us": {"US": 10}},
    )
