"""All sections of params.yaml together; each section belongs to the package that uses it."""

import difflib
import os
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from data.residency import Residency, Rule
from data.shard import ShardConfig
from pipeline.errors import ConfigError
from storage.region import Region
from training.config import (
    CheckpointConfig,
    EvaluateConfig,
    OptimizerConfig,
    ParallelDims,
    RegisterConfig,
    TrainConfig,
)

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


class Config(BaseModel, frozen=True, extra="forbid"):
    """One run of the pipeline."""

    dataset: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    workload: WorkloadConfig
    regions: dict[str, Region]
    residency: Residency
    ingest: IngestConfig = IngestConfig()
    shard: ShardConfig = ShardConfig()
    upload: UploadConfig = UploadConfig()
    train: TrainConfig
    evaluate: EvaluateConfig = EvaluateConfig()
    registration: RegisterConfig = Field(alias="register")
    schedule: ScheduleConfig = ScheduleConfig()

    @field_validator("regions", mode="before")
    @classmethod
    def _name_regions(cls, regions: Any) -> Any:
        if not isinstance(regions, dict) or not regions:
            raise ValueError("must name at least one region")
        return {
            name: {"name": name, **region} if isinstance(region, dict) else region
            for name, region in regions.items()
        }

    @model_validator(mode="after")
    def _regions_exist(self) -> "Config":
        def check(place: str, names: tuple[str, ...]) -> None:
            for name in names:
                if name not in self.regions:
                    known = ", ".join(self.regions)
                    raise ValueError(f"{place}: there is no region '{name}'; there are {known}")

        check("train.region", (self.train.region,))
        check("upload.regions", self.upload.regions or ())
        for rule in self.residency.rules:
            check(f"residency.rules: rule '{rule.name}'", rule.regions)
        if self.upload.regions and self.train.region not in self.upload.regions:
            raise ValueError(f"upload.regions must name train.region '{self.train.region}'")
        return self

    @property
    def upload_regions(self) -> tuple[Region, ...]:
        return tuple(self.regions[name] for name in self.upload.regions or self.regions)

    @property
    def site(self) -> Region:
        """The region where training reads."""
        return self.regions[self.train.region]

    @property
    def tracking_uri(self) -> str:
        return os.environ.get("MLFLOW_TRACKING_URI") or self.registration.tracking_uri

    @classmethod
    def load(cls, path: str | Path = PARAMS_FILE) -> "Config":
        """Read and check a params.yaml. Raises ConfigError naming file, line, field and remedy."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing: run this in a workspace, or make one with "
                "`convoy init NAME --from FILE`"
            ) from None
        try:
            content = yaml.load(text, Loader=yaml.CSafeLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: must be a mapping of sections")
        _refuse_dates(content, (), path, text)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise ConfigError(_explain(error, path, text)) from None


_SECTIONS: dict[tuple[Any, ...], type[BaseModel]] = {
    (): Config,
    ("workload",): WorkloadConfig,
    ("regions", "*"): Region,
    ("residency",): Residency,
    ("residency", "rules", "*"): Rule,
    ("ingest",): IngestConfig,
    ("shard",): ShardConfig,
    ("upload",): UploadConfig,
    ("train",): TrainConfig,
    ("train", "dims"): ParallelDims,
    ("train", "optimizer"): OptimizerConfig,
    ("train", "checkpoint"): CheckpointConfig,
    ("evaluate",): EvaluateConfig,
    ("register",): RegisterConfig,
    ("schedule",): ScheduleConfig,
}


def _explain(error: ValidationError, path: Path, text: str) -> str:
    lines = _lines_of_keys(text)
    messages = []
    for problem in error.errors(include_url=False, include_input=False):
        loc = tuple(part for part in problem["loc"] if part != "[key]")
        line = next((lines[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in lines), None)
        place = f"{path}:{line}" if line else str(path)
        field = ".".join(str(part) for part in loc)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "unknown key" + _suggest(loc)
        elif problem["type"] == "missing":
            message = "is missing"
        messages.append(f"{place}: {field + ': ' if field else ''}{message}")
    return "\n".join(messages)


def _refuse_dates(value: Any, loc: tuple[Any, ...], path: Path, text: str) -> None:
    """DVC, which reads the file too, stops at a bare date with an internal error."""
    if isinstance(value, date):
        line = _lines_of_keys(text).get(loc)
        field = ".".join(str(part) for part in loc)
        raise ConfigError(f'{path}:{line}: {field}: put the date in quotes: "{value}"')
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_dates(inner, (*loc, key), path, text)


def _suggest(loc: tuple[Any, ...]) -> str:
    """The keys that could have been meant, from the model that refused this one."""
    section = tuple("*" if isinstance(part, int) else part for part in loc[:-1])
    if section[:1] == ("regions",):
        section = ("regions", "*")
    fields = _SECTIONS[section].model_fields
    known = [field.alias or name for name, field in fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}"


def _lines_of_keys(text: str) -> dict[tuple[Any, ...], int]:
    """The line (from 1) of every key and list item of a YAML text."""
    lines: dict[tuple[Any, ...], int] = {}

    def walk(node: yaml.Node, loc: tuple[Any, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                lines[(*loc, key.value)] = key.start_mark.line + 1
                walk(value, (*loc, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                lines[(*loc, index)] = value.start_mark.line + 1
                walk(value, (*loc, index))

    root = yaml.compose(text, Loader=yaml.CSafeLoader)
    if root is not None:
        walk(root, ())
    return lines
