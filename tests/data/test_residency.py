"""Default deny, and every refusal says why."""

from datetime import date

import pytest
from pydantic import ValidationError

from data.errors import ResidencyError
from data.residency import Residency, Rule
from data.shard import Shard


def rule(
    name: str, jurisdictions: tuple[str, ...], regions: tuple[str, ...], **more: object
) -> Rule:
    values: dict[str, object] = {
        "name": name,
        "jurisdictions": jurisdictions,
        "artifacts": ("shard",),
        "regions": regions,
        "mechanism": "home",
        "evidence": "docs",
        "expires": "2099-01-01",
    }
    return Rule.model_validate(values | more)


POLICY = Residency(
    rules=(
        rule("eu", ("EU",), ("eu",)),
        rule("us", ("US",), ("us", "eu")),
        rule("old", ("CN",), ("cn",), expires="2020-01-01"),
    )
)


def shard(jurisdiction: str, records: int = 10) -> Shard:
    return Shard(
        name=f"train-{jurisdiction}-00000.arrow",
        digest="0" * 64,
        split="train",
        jurisdiction=jurisdiction,
        num_records=records,
        num_bytes=1,
    )


@pytest.mark.parametrize(
    ("jurisdiction", "artifact", "region", "allowed", "reason"),
    [
        ("EU", "shard", "eu", True, "rule 'eu'"),
        ("US", "shard", "eu", True, "rule 'us'"),
        ("EU", "shard", "us", False, "no rule lets shard of EU be in us"),
        ("EU", "model", "eu", False, "no rule lets model of EU be in eu"),
        ("CN", "shard", "cn", False, "rule 'old' expired on 2020-01-01"),
        ("XX", "shard", "eu", False, "no rule names jurisdiction 'XX'"),
    ],
)
def test_decisions(
    jurisdiction: str, artifact: str, region: str, allowed: bool, reason: str
) -> None:
    decision = POLICY.decide(jurisdiction, artifact, region)  # type: ignore[arg-type]
    assert decision.allowed is allowed
    assert reason in decision.reason


def test_a_rule_holds_on_its_last_day_and_not_after() -> None:
    policy = Residency(rules=(rule("r", ("EU",), ("eu",), expires="2030-06-30"),))
    assert policy.decide("EU", "shard", "eu", date(2030, 6, 30)).allowed
    assert not policy.decide("EU", "shard", "eu", date(2030, 7, 1)).allowed


def test_nothing_is_allowed_without_rules() -> None:
    assert not Residency().decide("EU", "shard", "eu").allowed


def test_fail_refuses_by_name_and_exclude_counts() -> None:
    shards = (shard("EU"), shard("US"), shard("CN", 7), shard("CN", 5))
    with pytest.raises(ResidencyError, match=r"CN.*no rule lets.*residency\.rules"):
        POLICY.split_readable(shards, "eu")
    excluding = POLICY.model_copy(update={"on_restricted": "exclude"})
    readable, excluded = excluding.split_readable(shards, "eu")
    assert [s.jurisdiction for s in readable] == ["EU", "US"]
    [exclusion] = excluded
    assert (exclusion.jurisdiction, exclusion.num_shards, exclusion.num_records) == ("CN", 2, 12)


@pytest.mark.parametrize("field", ["mechanism", "evidence"])
def test_a_rule_must_say_its_ground(field: str) -> None:
    with pytest.raises(ValidationError, match="must say something"):
        rule("r", ("EU",), ("eu",), **{field: " "})


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="two rules are named 'r'"):
        Residency(rules=(rule("r", ("EU",), ("eu",)), rule("r", ("US",), ("us",))))


@pytest.mark.parametrize(
    "more", [{}, {"mechanism": "contract"}, {"expires": "2030-01-01"}, {"yearly_limit": 5}]
)
def test_two_rules_about_the_same_contradict_each_other(more: dict[str, object]) -> None:
    words = r"'r' and 's' contradict each other: both say whether shard of US may be in eu"
    with pytest.raises(ValidationError, match=words):
        Residency(
            rules=(rule("r", ("EU", "US"), ("eu",)), rule("s", ("US",), ("us", "eu"), **more))
        )
