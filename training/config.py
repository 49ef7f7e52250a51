"""How to train: degrees, steps, batch, optimiser, seed, checkpoints. Loads no torch."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from data.cache import CacheConfig

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class ParallelDims(BaseModel, frozen=True, extra="forbid"):
    """Degrees of parallelism. Their product is the world size."""

    dp_replicate: PositiveInt = 2
    """Copies of the model, each on its part of the batch (DDP)."""
    dp_shard: PositiveInt = 1
    """Ways the parameters are sharded (FSDP)."""
    tp: PositiveInt = 1
    """Ways each layer is split (tensor parallelism)."""
    pp: PositiveInt = 1
    """Stages that the layers are cut into (pipeline parallelism)."""

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.pp

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds the whole model."""
        return self.world_size > self.dp_replicate

    @property
    def num_replicas(self) -> int:
        """Parts that a global batch is cut into."""
        return self.dp_replicate * self.dp_shard

    @model_validator(mode="after")
    def _only_replicas_yet(self) -> "ParallelDims":
        for name in ("dp_shard", "tp", "pp"):
            if getattr(self, name) != 1:
                raise ValueError(f"{name} must be 1: this release trains with dp_replicate alone")
        return self


class OptimizerConfig(BaseModel, frozen=True, extra="forbid"):
    """The optimiser and its schedule: linear warm-up, then a cosine down to `final_lr_ratio`."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """For adamw."""
    momentum: NonNegativeFloat = 0.0
    """For sgd."""
    weight_decay: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    final_lr_ratio: NonNegativeFloat = 0.1
    grad_clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null does not clip."""


class CheckpointConfig(BaseModel, frozen=True, extra="forbid"):
    """When to commit a resumable state, where, and how many to keep."""

    every_steps: PositiveInt | None = None
    """Steps between checkpoints; 100 when `every_seconds` is null too."""
    every_seconds: PositiveFloat | Literal["auto"] | None = None
    """Seconds between checkpoints. `auto`: what loses the least time, from what a checkpoint costs
    and how often the run is stopped."""
    failure_seconds: PositiveFloat = 14_400.0
    """For `auto`: mean time between failures before the run has seen any."""
    keep: PositiveInt = 2
    """The newest ones that are kept."""
    keep_best: bool = True
    """Keep the one of the lowest training loss too."""
    store: bool = True
    """Also place them, sealed, in the training region's store: a lost disk loses no checkpoint."""

    @property
    def steps_between(self) -> int | None:
        """Steps between checkpoints; None when seconds alone count."""
        return 100 if self.every_steps is None and self.every_seconds is None else self.every_steps


class TrainConfig(BaseModel, frozen=True, extra="forbid"):
    """How to train."""

    region: str
    """The site: it reads its own region's store with its own region's key, and no other."""
    dims: ParallelDims = ParallelDims()
    steps: PositiveInt
    global_batch: PositiveInt
    """Samples in one step, over all workers."""
    seed: NonNegativeInt = 0
    window_shards: PositiveInt = 64
    """Shards among which samples are shuffled. A worker holds up to two windows in memory."""
    window_bytes: PositiveInt = 256 << 20
    """Upper bound of a window in bytes of the largest shard's file, so that memory does not grow
    with the shards' size; compressed shards take several times that when they are open. One shard
    is always held. It is part of the order: another bound that cuts windows gives another one."""
    cache: CacheConfig | None = None
    """Keeps sealed shards on this machine's disk; null reads the store in every epoch."""
    verify: Literal["seal", "digest"] = "seal"
    """What opening a shard asks of it. The seal refuses whatever was not sealed, by a holder of the
    data key, as this very shard of this manifest; the digest refuses what such a holder forged."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log_every_steps: PositiveInt = 10
    profile: NonNegativeInt = 0
    """Steps, soon after the start, that each worker records a trace of: `convoy profile` shows
    which waits for which. 0 records none."""
    max_restarts: NonNegativeInt = 3
    """How often workers that were killed are started again from the last checkpoint."""
    model: dict[str, Any] = {}
    """Keyword arguments of the workload's model()."""

    @model_validator(mode="after")
    def _batch_divides(self) -> "TrainConfig":
        # The loader could cut it unevenly, but DDP's mean over replicas would weigh some samples
        # more than others.
        replicas = self.dims.num_replicas
        if self.global_batch % replicas:
            below = self.global_batch // replicas * replicas
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of the {replicas} replicas "
                f"in dims: take {f'{below} or ' if below else ''}{below + replicas}"
            )
        return self


class EvaluateConfig(BaseModel, frozen=True, extra="forbid"):
    """What is measured on the held-out records."""

    batch: PositiveInt = 256
    primary: str = "loss"
    """The metric that decides which model is the champion."""
    goal: Literal["minimize", "maximize"] = "minimize"
    workers: PositiveInt | None = None
    """Processes that score the held-out records; the result is the same to the bit. null: one where
    each copy of the model is whole (workers take longer to start than to score a small set), and
    as many as in training where `train.dims` cuts the model into parts."""


class RegisterConfig(BaseModel, frozen=True, extra="forbid"):
    """Where the model is registered, and as what."""

    model_name: str
    experiment: str = "convoy"
    tracking_uri: str = "sqlite:///.convoy/mlflow.db"
    """MLFLOW_TRACKING_URI in the environment overrides it."""
    region: str | None = None
    """The region that MLflow and its artifacts are in; null for one on this machine, which is in
    `train.region`."""
    require_clean_git: bool = False
    """Refuse, before anything is spent, to train from uncommitted code or parameters."""
