"""How to train: degrees, steps, batch, optimiser, seed, checkpoints. Loads no torch."""

from typing import Any, Literal

from pydantic import (
    BaseModel,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from data.cache import CacheConfig
from training.config_checks import check_together
from training.recovery_config import NetworkConfig, RecoveryConfig
from training.synchronize_config import Decay, SynchronizeConfig


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


Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"
]


class PipelineConfig(BaseModel, frozen=True, extra="forbid"):
    """How microbatches go through the stages when `dims.pp` is more than 1."""

    schedule: Schedule = "1f1b"
    microbatches: PositiveInt = 4
    """Equal parts that a replica's batch is cut into; more of them leave stages less idle."""
    stages_per_worker: PositiveInt = 1
    """Stages that each worker holds: 1 for gpipe and 1f1b, 2 or more for the interleaved schedules,
    2 for zbv_zero_bubble."""

    @model_validator(mode="after")
    def _stages_fit_schedule(self) -> "PipelineConfig":
        single, two = self.schedule in ("gpipe", "1f1b"), self.schedule == "zbv_zero_bubble"
        held = self.stages_per_worker
        if (single and held != 1) or (two and held != 2) or (not single and held < 2):
            wanted = "1" if single else "2" if two else "2 or more"
            raise ValueError(
                f"stages_per_worker {held} does not fit schedule {self.schedule}: take {wanted}"
            )
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
    sequence_parallel: bool = False
    """With `dims.tp`: what lies between the split layers is split too, along the sequence."""
    loss_parallel: bool = False
    """With `dims.tp`: the loss is computed on logits that stay split along the vocabulary."""
    pipeline: PipelineConfig = PipelineConfig()
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: of each layer only the input is kept, and the rest computed again when needed."""
    compile: bool = False
    """Compile each layer by torch.compile."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What layers compute in; parameters, their averages and the loss stay float32."""
    steps: PositiveInt
    """Optimiser steps of the whole run."""
    global_batch: PositiveInt
    """Samples in one step, over all workers."""
    accumulate: PositiveInt = 1
    """Parts that a replica's batch goes through the model in, one after another, to save memory."""
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    """When loss or gradient is not finite. skip: that batch changes nothing. roll_back: take the
    last checkpoint's parameters and go on with the next batch."""
    max_nonfinite: PositiveInt = 10
    """Batches that may be skipped or rolled back in one run before it stops."""
    seed: NonNegativeInt = 0
    """Of the initial weights and of the order of the samples."""
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
    synchronize: SynchronizeConfig = SynchronizeConfig()
    reproducible: bool = False
    """The same bits whatever the number of workers: gradients are summed over virtual ranks in a
    fixed tree. For dp_replicate alone; what it costs: docs/synchronization.md."""
    virtual_ranks: PositiveInt = 8
    """With reproducible: equal parts of the global batch, a power of two. The number of workers
    must divide it."""
    log_every_steps: PositiveInt = 10
    """Steps that one line of the log, and one point of the curves, sums up."""
    profile: NonNegativeInt = 0
    """Steps, soon after the start, that each worker records a trace of: `convoy profile` shows
    which waits for which. 0 records none."""
    system_metrics_seconds: PositiveFloat | None = None
    """Seconds between two samples of what the workers take of this machine (processor, memory) and
    what is left of it, as MLflow metrics that begin with `system/`; null takes none."""
    nodes: PositiveInt = 1
    """Nodes that the workers are spread over, each with processes of its own."""
    min_nodes: PositiveInt | None = None
    """Fewest nodes to go on with when some are lost, with fewer replicas; null: all of them."""
    max_restarts: NonNegativeInt = 3
    """How often the workers are started again from the last checkpoint."""
    recovery: RecoveryConfig = RecoveryConfig()
    network: NetworkConfig = NetworkConfig()
    model: dict[str, Any] = {}
    """Keyword arguments of the workload's model()."""

    @property
    def samples_at_once(self) -> int:
        """Samples that are used up while each worker makes a step."""
        is_whole = self.synchronize.mode == "asynchronous"
        return self.global_batch * (self.dims.world_size if is_whole else 1)

    @property
    def least_nodes(self) -> int:
        return self.min_nodes or self.nodes

    @property
    def least_replicas(self) -> int:
        """Of a hot world: fewest replicas that make a step; those of `min_nodes`, where it says."""
        return (self.min_nodes or 0) * self.dims.world_size // self.nodes or 1

    def fit_dims(self, num_nodes: int) -> ParallelDims | None:
        """The degrees on so many nodes, with fewer replicas than on all; None if none fit."""
        for name in ("dp_replicate", "dp_shard"):
            degree = getattr(self.dims, name) * num_nodes
            if degree % self.nodes == 0:
                dims = self.dims.model_copy(update={name: degree // self.nodes})
                return dims if self.global_batch % dims.num_replicas == 0 else None
        return None

    @model_validator(mode="after")
    def _check_together(self) -> "TrainConfig":
        check_together(self)
        return self


class EvaluateConfig(BaseModel, frozen=True, extra="forbid"):
    """What is measured on the held-out records."""

    batch: PositiveInt = 256
    """Records that are scored at once."""
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
    """Its name in the MLflow registry."""
    experiment: str = "convoy"
    """The MLflow experiment of the runs."""
    tracking_uri: str = "sqlite:///.convoy/mlflow.db"
    """MLFLOW_TRACKING_URI in the environment overrides it."""
    region: str | None = None
    """The region that MLflow and its artifacts are in; null for one on this machine, which is in
    `train.region`."""
    require_clean_git: bool = False
    """Refuse, before anything is spent, to train from uncommitted code or parameters."""
