"""The residency policy: the only code that decides where anything may be. Default deny."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, date, datetime
from functools import cached_property
from itertools import product
from typing import Literal

import rfc8785
from pydantic import BaseModel, Field, PositiveInt, field_validator

from data.errors import ResidencyError
from data.shard import Shard

Artifact = Literal["raw", "shard", "checkpoint", "delta", "model", "metrics", "log"]


class Rule(BaseModel, frozen=True, extra="forbid"):
    """One permission, with what an auditor asks of it."""

    name: str
    jurisdictions: tuple[str, ...] = Field(min_length=1)
    """Whose records. There is no wildcard: what is not named is refused."""
    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    """Which classes of things made of those records."""
    regions: tuple[str, ...] = Field(min_length=1)
    """Where they may be."""
    mechanism: str
    """The legal ground, for example `home`, `adequacy decision`, `open data`."""
    evidence: str
    """Where the ground is written down."""
    expires: date
    """The last day on which the rule holds (UTC)."""
    yearly_limit: PositiveInt | None = None
    """Records of one jurisdiction that may leave it by this rule in a calendar year (UTC)."""

    @field_validator("mechanism", "evidence")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must say something")
        return value


class Decision(BaseModel, frozen=True, extra="forbid"):
    """The policy's answer to one question, with its reason."""

    allowed: bool
    jurisdiction: str
    artifact: Artifact
    region: str
    rule: str | None
    reason: str


class Exclusion(BaseModel, frozen=True, extra="forbid"):
    """Records that a site may not read, and why."""

    jurisdiction: str
    num_shards: int
    num_records: int
    reason: str


class Residency(BaseModel, frozen=True, extra="forbid"):
    """The rules, and what to do with shards that a site may not read."""

    on_restricted: Literal["fail", "exclude"] = "fail"
    """`fail` stops; `exclude` trains without them and reports how many of whom and why."""
    rules: tuple[Rule, ...] = ()

    @field_validator("rules")
    @classmethod
    def _unique_names(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        repeated = [n for n, count in Counter(rule.name for rule in rules).items() if count > 1]
        if repeated:
            raise ValueError(f"two rules are named '{repeated[0]}'")
        return rules

    @field_validator("rules")
    @classmethod
    def _one_answer(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """Two rules about the same would each give another ground, expiry or limit for it."""
        answers: dict[tuple[str, str, str], str] = {}
        for rule in rules:
            for question in product(rule.jurisdictions, rule.artifacts, rule.regions):
                other = answers.setdefault(question, rule.name)
                if other != rule.name:
                    jurisdiction, artifact, region = question
                    raise ValueError(
                        f"'{other}' and '{rule.name}' contradict each other: both say whether "
                        f"{artifact} of {jurisdiction} may be in {region}. Leave it to one of them "
                        "(a renewed rule takes the old one's place; git keeps that)"
                    )
        return rules

    @cached_property
    def jurisdictions(self) -> frozenset[str]:
        """Those that any rule names."""
        return frozenset(name for rule in self.rules for name in rule.jurisdictions)

    def decide(
        self, jurisdiction: str, artifact: Artifact, region: str, today: date | None = None
    ) -> Decision:
        """May this artifact of that jurisdiction's records be in the region?"""
        today = today or datetime.now(UTC).date()
        expired: Rule | None = None
        for rule in self.rules:
            if (
                jurisdiction in rule.jurisdictions
                and artifact in rule.artifacts
                and region in rule.regions
            ):
                if rule.expires >= today:
                    reason = f"rule '{rule.name}': {rule.mechanism} ({rule.evidence})"
                    return self._decision(True, jurisdiction, artifact, region, rule, reason)
                expired = rule
        if expired:
            reason = f"rule '{expired.name}' expired on {expired.expires}"
        elif jurisdiction not in self.jurisdictions:
            reason = f"no rule names jurisdiction '{jurisdiction}'"
        else:
            reason = f"no rule lets {artifact} of {jurisdiction} be in {region}"
        return self._decision(False, jurisdiction, artifact, region, expired, reason)

    def find_rule(self, name: str) -> Rule:
        """The rule of that name."""
        return next(rule for rule in self.rules if rule.name == name)

    def require(self, jurisdiction: str, artifact: Artifact, region: str) -> None:
        """Raise ResidencyError, with the reason and the remedy, unless it is allowed."""
        decision = self.decide(jurisdiction, artifact, region)
        if not decision.allowed:
            raise refusal(decision)

    def split_readable(
        self, shards: Iterable[Shard], region: str
    ) -> tuple[tuple[Shard, ...], tuple[Exclusion, ...]]:
        """The shards that may be read in the region, and what is excluded and why.

        Raises ResidencyError for restricted shards under `on_restricted: fail`.
        """
        readable: list[Shard] = []
        excluded: dict[str, list[Shard]] = {}
        for shard in shards:
            if self.decide(shard.jurisdiction, "shard", region).allowed:
                readable.append(shard)
            else:
                excluded.setdefault(shard.jurisdiction, []).append(shard)
        if excluded and self.on_restricted == "fail":
            self.require(min(excluded), "shard", region)
        return tuple(readable), tuple(
            Exclusion(
                jurisdiction=jurisdiction,
                num_shards=len(group),
                num_records=sum(shard.num_records for shard in group),
                reason=self.decide(jurisdiction, "shard", region).reason,
            )
            for jurisdiction, group in sorted(excluded.items())
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the policy's canonical JSON, hex."""
        return hashlib.sha256(rfc8785.dumps(self.model_dump(mode="json"))).hexdigest()

    @staticmethod
    def _decision(
        allowed: bool,
        jurisdiction: str,
        artifact: Artifact,
        region: str,
        rule: Rule | None,
        reason: str,
    ) -> Decision:
        return Decision(
            allowed=allowed,
            jurisdiction=jurisdiction,
            artifact=artifact,
            region=region,
            rule=rule.name if rule else None,
            reason=reason,
        )


def refusal(decision: Decision) -> ResidencyError:
    """The error that says what may not be where, why, and what to do about it."""
    return ResidencyError(
        f"residency: {decision.artifact} of {decision.jurisdiction} may not be in region "
        f"{decision.region}: {decision.reason}. If the law allows it, add or renew a rule in "
        "params.yaml: residency.rules"
    )
