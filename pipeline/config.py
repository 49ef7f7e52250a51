"""All sections of params.yaml together; each section belongs to the package that uses it."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from data.errors import ResidencyError
from data.residency import Residency, Rule
from data.sharding import ShardConfig
from pipeline.errors import ConfigError
from pipeline.params_file import ParamsFile, read_params_file
from storage.log_checkpoint import AuditConfig
from storage.region import Claims, Region
from training.config import (
    CheckpointConfig,
    EvaluateConfig,
    OptimizerConfig,
    ParallelDims,
    RegisterConfig,
    TrainConfig,
)
from training.recovery_config import NetworkConfig, RecoveryConfig
from training.tracking import is_on_this_machine

PARAMS_FILE = "params.yaml"


class WorkloadConfig(BaseModel, frozen=True, extra="forbid"):
    """The user's module."""

    module: str
    """Import path, from the workspace."""
    code: Path
    """The file or folder of its code: DVC watches it, and the registered model carries it."""


class IngestConfig(BaseModel, frozen=True, extra="forbid"):
    """Where the raw input comes from."""

    source: Path | None = None
    """A file or folder to copy, for a workload without ingest()."""
    params: dict[str, Any] = {}
    """Keyword arguments of the workload's ingest()."""


class UploadConfig(BaseModel, frozen=True, extra="forbid"):
    """Which regions get what may live there."""

    regions: tuple[str, ...] | None = None
    """Names of regions; all of them when null."""


class ScheduleConfig(BaseModel, frozen=True, extra="forbid"):
    """When the served deployment runs by itself."""

    cron: str | None = None
    """Five fields, as in crontab; null runs on demand alone."""
    timezone: str = "UTC"
    retries: NonNegativeInt = 1
    """How often a failed stage is tried again in a flow."""
    wait_seconds: float = Field(default=600.0, ge=0.0)
    """How long a run waits for nodes of this machine that other runs have, where
    CONVOY_MACHINE_NODES says how many there are."""
    max_resubmissions: NonNegativeInt = 3
    """How often a run is submitted again whose process, worker or machine died."""
    silence_seconds: float = Field(default=300.0, ge=45.0)
    """After which a run whose heartbeats, of every 30 s, stay away is taken for dead. A Prefect
    server may be away for less without harm."""

    @field_validator("cron")
    @classmethod
    def _five_fields(cls, cron: str | None) -> str | None:
        if cron is not None and len(cron.split()) != 5:
            raise ValueError('must have five fields, as in crontab: "0 3 * * *" is daily at three')
        return cron

    @field_validator("timezone")
    @classmethod
    def _known_timezone(cls, name: str) -> str:
        try:
            ZoneInfo(name)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"there is no time zone '{name}'; UTC and Asia/Tokyo are") from None
        return name


class VersioningConfig(BaseModel, frozen=True, extra="forbid"):
    """Where `convoy push` keeps the raw input."""

    remotes: dict[str, str] = {}
    """A DVC remote for a region, as DVC takes it: a folder, s3://BUCKET/PATH, ssh://HOST/PATH, ...
    A region without one has .convoy/dvc/REGION."""


class Config(BaseModel, frozen=True, extra="forbid"):
    """One run of the pipeline."""

    dataset: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Its name: of its folder in datasets/, in the stores, of the deployment."""
    workload: WorkloadConfig
    regions: dict[str, Region]
    residency: Residency
    # No defaults: DVC stops at a section that dvc.yaml names and params.yaml lacks.
    ingest: IngestConfig
    shard: ShardConfig
    upload: UploadConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    registration: RegisterConfig = Field(alias="register")
    schedule: ScheduleConfig = ScheduleConfig()
    versioning: VersioningConfig = VersioningConfig()
    audit: AuditConfig = AuditConfig()

    @field_validator("regions", mode="before")
    @classmethod
    def _name_regions(cls, regions: Any) -> Any:
        if not isinstance(regions, dict) or not regions:
            raise ValueError("must name at least one region")
        for name, region in regions.items():
            if isinstance(region, dict) and "name" in region:
                raise ValueError(f"{name}: remove the key 'name': the region is named by its key")
        return {
            name: {"name": name, **region} if isinstance(region, dict) else region
            for name, region in regions.items()
        }

    @field_validator("regions")
    @classmethod
    def _stores_differ(cls, regions: dict[str, Region]) -> dict[str, Region]:
        stores = Counter(region.store for region in regions.values())
        for store, count in stores.items():
            if count > 1:
                names = ", ".join(name for name, r in regions.items() if r.store == store)
                raise ValueError(f"{names} have one store: give each a store of its own")
        return regions

    @model_validator(mode="after")
    def _regions_exist(self) -> "Config":
        def check(place: str, names: tuple[str, ...]) -> None:
            for name in names:
                if name not in self.regions:
                    known = ", ".join(self.regions)
                    raise ValueError(f"{place}: there is no region '{name}'; there are {known}")

        check("train.region", (self.train.region,))
        check("upload.regions", self.upload.regions or ())
        if self.registration.region:
            check("register.region", (self.registration.region,))
        if self.audit.region:
            check("audit.region", (self.audit.region,))
        check("versioning.remotes", tuple(self.versioning.remotes))
        for rule in self.residency.rules:
            check(f"residency.rules: rule '{rule.name}'", rule.regions)
            self._check_home(rule)
        if self.upload.regions and self.train.region not in self.upload.regions:
            raise ValueError(f"upload.regions: must name train.region '{self.train.region}'")
        return self

    def _check_home(self, rule: Rule) -> None:
        """A rule that calls a region home contradicts that region's own jurisdiction."""
        if rule.mechanism == "home":
            for name in rule.regions:
                if self.regions[name].jurisdiction not in rule.jurisdictions:
                    raise ValueError(
                        f"residency.rules: rule '{rule.name}' calls region {name} home, and that "
                        f"is in {self.regions[name].jurisdiction}, whose records the rule does "
                        "not name: correct regions, jurisdictions or mechanism"
                    )

    @property
    def upload_regions(self) -> tuple[Region, ...]:
        return tuple(self.regions[name] for name in self.upload.regions or self.regions)

    @property
    def site(self) -> Region:
        """The region where training reads."""
        return self.regions[self.train.region]

    @property
    def tracking_region(self) -> Region:
        """Where metrics and models go. Raises ResidencyError for an MLflow elsewhere that no
        region is named for: nothing is assumed of it.
        """
        if self.registration.region is not None:
            return self.regions[self.registration.region]
        if not is_on_this_machine(self.tracking_uri):
            raise ResidencyError(
                f"{PARAMS_FILE}: register.region: MLflow at {self.tracking_uri} is not on this "
                "machine, so name the region that it and its artifacts are in: one of "
                f"{', '.join(self.regions)}"
            )
        return self.site

    @property
    def witness_region(self) -> Region | None:
        """Where the access log's checkpoints go; None where they stay on this machine, as the log
        does. Raises ResidencyError for a witness elsewhere that no region is named for.
        """
        if self.audit.region is not None:
            return self.regions[self.audit.region]
        if not self.audit.is_on_this_machine:
            raise ResidencyError(
                f"{PARAMS_FILE}: audit.region: the witness {self.audit.witness} is not on this "
                f"machine, so name the region that it is in: one of {', '.join(self.regions)}"
            )
        return None

    def find_region(self, name: str) -> Region:
        """The region of that name. Raises ConfigError."""
        if name not in self.regions:
            known = ", ".join(self.regions)
            raise ConfigError(
                f"{PARAMS_FILE}: regions: there is no region '{name}'; there are {known}"
            )
        return self.regions[name]

    def home_of(self, jurisdiction: str) -> Region | None:
        """The region within a jurisdiction, the first if there are several."""
        return next((r for r in self.regions.values() if r.jurisdiction == jurisdiction), None)

    @property
    def tracking_uri(self) -> str:
        """Where MLflow is. The path of a SQLite file is absolute: MLflow keeps a database open by
        its URI, so that a relative one would mean the first workspace of a process.
        """
        uri = os.environ.get("MLFLOW_TRACKING_URI") or self.registration.tracking_uri
        scheme, found, path = uri.partition("sqlite:///")
        return f"sqlite:///{Path(path).absolute()}" if found and not scheme else uri

    @classmethod
    def load(cls, path: str | Path = PARAMS_FILE) -> "Config":
        """Read and check a params.yaml. Raises ConfigError naming file, line, field and remedy."""
        file = read_params_file(Path(path))
        try:
            # As JSON, and strictly: a list is a tuple there, and "50" or true is no number.
            return cls.model_validate_json(json.dumps(file.content), strict=True)
        except ValidationError as error:
            raise ConfigError(_explain(error, file)) from None


_SECTIONS: dict[tuple[Any, ...], type[BaseModel]] = {
    (): Config,
    ("workload",): WorkloadConfig,
    ("regions", "*"): Region,
    ("regions", "*", "claims"): Claims,
    ("residency",): Residency,
    ("residency", "rules", "*"): Rule,
    ("ingest",): IngestConfig,
    ("shard",): ShardConfig,
    ("upload",): UploadConfig,
    ("train",): TrainConfig,
    ("train", "dims"): ParallelDims,
    ("train", "optimizer"): OptimizerConfig,
    ("train", "checkpoint"): CheckpointConfig,
    ("train", "recovery"): RecoveryConfig,
    ("train", "network"): NetworkConfig,
    ("evaluate",): EvaluateConfig,
    ("register",): RegisterConfig,
    ("schedule",): ScheduleConfig,
    ("versioning",): VersioningConfig,
    ("audit",): AuditConfig,
}


def _explain(error: ValidationError, file: ParamsFile) -> str:
    messages = []
    for problem in error.errors(include_url=False):
        loc = tuple(part for part in problem["loc"] if part != "[key]")
        message = problem["msg"].removeprefix("Value error, ")
        if not loc and ": " in message:  # of a check across sections, which names the field first
            field, message = message.split(": ", 1)
            loc = tuple(field.split("."))
        if problem["type"] == "extra_forbidden":
            message = "unknown key" + _suggest(loc)
        elif problem["type"] == "missing":
            message = "is missing"
        elif problem["type"] == "string_type" and isinstance(problem["input"], bool | int | float):
            message += ": put it in quotes (a bare NO, yes or 01 is none in YAML)"
        messages.append(file.complain(loc, message))
    return "\n".join(messages)


def _suggest(loc: tuple[Any, ...]) -> str:
    """The keys that could have been meant, from the model that refused this one."""
    import difflib

    section = tuple("*" if isinstance(part, int) else part for part in loc[:-1])
    if section[:1] == ("regions",):
        section = ("regions", "*", *section[2:])
    fields = _SECTIONS[section].model_fields
    known = [field.alias or name for name, field in fields.items()]
    if section == ("regions", "*"):
        known.remove("name")  # the key says it
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"
