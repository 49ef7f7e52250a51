"""Every crossing that the present configuration leads to, with its verdict and its rule."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from typing import Literal

from pydantic import BaseModel

from data.crossings import Crossings, check_limits, find_crossings, find_new
from data.manifest import Manifest
from data.residency import Artifact, Decision
from pipeline.config import Config
from storage.region import Region

EXPIRY_DAYS = 30
"""How long before its end a rule is worth a warning."""

_MADE: tuple[Artifact, ...] = ("checkpoint", "model", "metrics")
_REGISTERED: tuple[Artifact, ...] = ("model", "metrics")

Asked = Literal["upload", "train", "register", "audit", "push"]


class AskedCrossing(BaseModel, frozen=True, extra="forbid"):
    """One question to the policy, and its answer."""

    asked_by: Asked
    jurisdiction: str
    artifact: Artifact
    from_region: str | None
    """The region at home in the jurisdiction; None when there is none."""
    to_region: str
    leaves_home: bool
    """Whether the region is outside the jurisdiction."""
    allowed: bool
    needed: bool
    """Whether the flow stops without it."""
    rule: str | None
    mechanism: str | None
    expires: date | None
    reason: str
    num_records: int | None
    """None before there is a manifest."""


class YearlyCount(BaseModel, frozen=True, extra="forbid"):
    """Records of a jurisdiction that left it since 1 January."""

    year: int
    jurisdiction: str
    num_records: int
    limits: dict[str, int]
    """Yearly limit, by rule."""


class ResidencyCheck(BaseModel, frozen=True, extra="forbid"):
    """What may cross, what may not, and what soon may not any more."""

    policy: str
    """Digest of the policy."""
    version: str | None
    """Of the dataset; None before there is a manifest."""
    crossings: tuple[AskedCrossing, ...]
    counts: tuple[YearlyCount, ...]
    warnings: tuple[str, ...]

    @property
    def refused(self) -> tuple[AskedCrossing, ...]:
        """What the flow needs and may not have."""
        return tuple(c for c in self.crossings if c.needed and not c.allowed)


def check_residency(
    config: Config,
    manifest: Manifest | None,
    counted: Crossings,
    today: date,
    places: Mapping[str, str],
) -> ResidencyCheck:
    """Ask what the flow and `convoy push` will ask. `places` says where each rule is written.

    Raises ResidencyError when MLflow or the log's witness is elsewhere and no region is named for
    it.
    """
    asking = _Asking(config, manifest, counted, today)
    crossings = tuple(asking.ask_all())
    counts = counted.count(today.year)
    return ResidencyCheck(
        policy=config.residency.digest,
        version=manifest.digest if manifest else None,
        crossings=crossings,
        counts=tuple(
            YearlyCount(
                year=today.year,
                jurisdiction=jurisdiction,
                num_records=num_records,
                limits={
                    rule.name: rule.yearly_limit
                    for rule in config.residency.rules
                    if rule.yearly_limit is not None and jurisdiction in rule.jurisdictions
                },
            )
            for jurisdiction, num_records in counts.items()
        ),
        warnings=(*_warn(config, crossings, today, places), *_warn_of_raw(config, manifest, today)),
    )


class _Asking:
    """Puts the questions of a stage, in the order of the flow."""

    def __init__(
        self, config: Config, manifest: Manifest | None, counted: Crossings, today: date
    ) -> None:
        self._config = config
        self._today = today
        self._over: dict[str, str] = {}
        self._num_records: dict[str, int] = {}
        if manifest:
            self._num_records = dict(manifest.count_records())
            coming = find_crossings(manifest, config.upload_regions, config.residency, today)
            after = counted.add(find_new(coming, counted))
            self._over = dict(check_limits(after, config.residency, today.year))
        self._jurisdictions = sorted(
            self._num_records if manifest else config.residency.jurisdictions
        )

    def ask_all(self) -> Iterator[AskedCrossing]:
        config = self._config
        site, tracking, witness = config.site, config.tracking_region, config.witness_region
        for name in self._jurisdictions:
            yield from self._ask_upload(name)
            read = self._ask("train", name, "shard", site, config.residency.on_restricted == "fail")
            yield read
            # Nothing is made of what may not be read.
            if read.allowed:
                for artifact in _MADE:
                    yield self._ask("train", name, artifact, site, needed=True)
                for artifact in _REGISTERED if tracking != site else ():
                    yield self._ask("register", name, artifact, tracking, needed=True)
            if witness:
                yield self._ask("audit", name, "log", witness, needed=True)
            for region in config.regions.values():
                yield self._ask("push", name, "raw", region, needed=False)

    def _ask_upload(self, jurisdiction: str) -> Sequence[AskedCrossing]:
        """Some region must be allowed; which one does not matter."""
        asked = [
            self._ask("upload", jurisdiction, "shard", region, needed=False)
            for region in self._config.upload_regions
        ]
        homeless = not any(crossing.allowed for crossing in asked)
        over = any(crossing.rule in self._over for crossing in asked)
        return [
            crossing.model_copy(update={"needed": crossing.allowed or homeless or over})
            for crossing in asked
        ]

    def _ask(
        self, asked_by: Asked, jurisdiction: str, artifact: Artifact, region: Region, needed: bool
    ) -> AskedCrossing:
        residency = self._config.residency
        decision: Decision = residency.decide(jurisdiction, artifact, region.name, self._today)
        rule = residency.find_rule(decision.rule) if decision.rule else None
        home = self._config.home_of(jurisdiction)
        exceeded = asked_by == "upload" and jurisdiction != region.jurisdiction
        over = self._over.get(decision.rule or "") if exceeded else None
        return AskedCrossing(
            asked_by=asked_by,
            jurisdiction=jurisdiction,
            artifact=artifact,
            from_region=home.name if home else None,
            to_region=region.name,
            leaves_home=jurisdiction != region.jurisdiction,
            allowed=decision.allowed and over is None,
            needed=needed,
            rule=decision.rule,
            mechanism=rule.mechanism if rule else None,
            expires=rule.expires if rule else None,
            reason=over or decision.reason,
            num_records=self._num_records.get(jurisdiction),
        )


def _warn(
    config: Config, crossings: Sequence[AskedCrossing], today: date, places: Mapping[str, str]
) -> Iterator[str]:
    used = {crossing.rule for crossing in crossings}
    for rule in config.residency.rules:
        left = rule.expires - today
        if rule.name not in used or left > timedelta(EXPIRY_DAYS):
            continue
        if left < timedelta(0):
            what = f"expired on {rule.expires}: renew it or remove it"
        else:
            what = f"expires on {rule.expires}, in {left.days} days: renew it"
        yield f"{places[rule.name]}: rule '{rule.name}' {what}"


def _warn_of_raw(config: Config, manifest: Manifest | None, today: date) -> Iterator[str]:
    """Nothing stops an ingest, whose input Convoy knows only once it is sharded."""
    kept_out = [
        jurisdiction
        for jurisdiction in sorted(manifest.count_records() if manifest else ())
        if not config.residency.decide(jurisdiction, "raw", config.site.name, today).allowed
    ]
    if kept_out:
        yield (
            f"raw input of {', '.join(kept_out)} was sharded on this machine, which counts as "
            f"region {config.site.name}, where no rule lets it be: ingest, shard and upload it "
            "on a machine where it may be"
        )
