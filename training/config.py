"""How to train: degrees, steps, batch, optimiser, seed, checkpoints. Loads no torch."""

from typing import Annotated, Any, Literal, NoReturn

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


class SynchronizeConfig(BaseModel, frozen=True, extra="forbid"):
    """How and when the copies of the model agree. What each choice trades:
    docs/synchronization.md."""

    mode: Literal["step", "local_sgd", "diloco", "asynchronous"] = "step"
    """step: gradients are averaged in every step. local_sgd: each worker steps by itself and the
    parameters are averaged from time to time. diloco: the same, and an outer optimiser makes the
    step from one average to the next. asynchronous: each worker takes the next global batch, steps
    by itself, and adds its step to parameters that rank 0 holds; it waits for nobody."""
    compress: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """For step: what is sent of a gradient. Half the bits, or with powersgd two thin matrices."""
    powersgd_rank: PositiveInt = 4
    """Columns of the thin matrices: more keep more of the gradient."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 50
    """Steps that are sent whole before powersgd begins."""
    every_steps: PositiveInt = 32
    """Steps from one average to the next; for asynchronous, global batches after which all workers
    meet with equal parameters, which is where checkpoints may be."""
    outer_lr: PositiveFloat = 0.7
    """For diloco: learning rate of the outer SGD on the averaged change of parameters."""
    outer_momentum: Decay = 0.9
    """For diloco: its Nesterov momentum; 0 has none."""
    num_fragments: PositiveInt = 1
    """For diloco: the model is cut into so many parts, each averaged at steps of its own, so that
    less is sent at once."""
    overlap_steps: NonNegativeInt = 0
    """For diloco: steps that go on while an average is on its way."""
    overlap_keep: Decay = 0.5
    """For diloco with overlap_steps: share of the worker's own parameters in the mix with the outer
    ones that arrive."""
    max_staleness: PositiveInt = 8
    """For asynchronous: steps that others may have added between the parameters that a step was
    computed from and the moment it is added itself. Fast workers wait before it would be more."""

    @property
    def is_local(self) -> bool:
        """Whether workers step by themselves, so that their parameters differ between averages."""
        return self.mode != "step"

    @model_validator(mode="after")
    def _fits_itself(self) -> "SynchronizeConfig":
        if self.compress != "none" and self.mode != "step":
            raise ValueError(
                f"compress: {self.compress} is of gradients, and mode {self.mode} sends none: take "
                "mode step or compress none"
            )
        if self.mode == "diloco" and self.every_steps % self.num_fragments:
            raise ValueError(
                f"every_steps {self.every_steps} must be a multiple of num_fragments "
                f"{self.num_fragments}, which share it evenly"
            )
        if self.mode == "diloco" and self.overlap_steps >= self.every_steps:
            raise ValueError(
                f"overlap_steps {self.overlap_steps} must be less than every_steps "
                f"{self.every_steps}: an average must arrive before the next one is asked for"
            )
        return self


class RecoveryConfig(BaseModel, frozen=True, extra="forbid"):
    """What is done when processes and nodes die or hang."""

    retried: tuple[Literal["killed", "node_lost", "hang", "memory", "error"], ...] = (
        "killed",
        "node_lost",
        "hang",
    )
    """Causes after which the workers are started again from the last checkpoint. Those of the
    code, `error` and `memory`, would be met again."""
    wait_seconds: PositiveFloat = 120.0
    """How long `min_nodes` nodes are waited for."""
    patience_seconds: PositiveFloat = 600.0
    """How long loading data, saving or starting may take without progress. Within a step three
    median steps and a second are a hang."""
    straggler_ratio: Annotated[float, Field(gt=1.0)] = 2.0
    """A rank whose own part of a step takes so many times as long as that of the others is named,
    with its lateness. Nothing else is done about it."""
    exclude_seconds: NonNegativeFloat = 10.0
    """How long the place of a lost node stays empty, where `min_nodes` can go on without it. It
    doubles with every loss of that node."""
    longest_exclude_seconds: NonNegativeFloat = 600.0
    """Most that a place stays empty."""
    longest_backoff_seconds: NonNegativeFloat = 60.0
    """Most that is waited before a start, after starts that came to no step. The waits double."""


class NetworkConfig(BaseModel, frozen=True, extra="forbid"):
    """What lies between the nodes of this machine."""

    namespaces: bool = False
    """Each node has a network namespace of its own, with an address and a link that can be cut and
    slowed, for tests and to debug: it takes iproute2 and the right to make namespaces, and falls
    back to the shared loopback device without them. Such a node reaches the others and nothing
    else, so that region and keys must be on this machine's disk."""
    rate_mbit: PositiveFloat | None = None
    """Megabits a second that each node's link lets through in each direction; null has no limit."""
    lost_seconds: PositiveFloat = 5.0
    """A node that has not answered over its link for so long is lost."""

    @model_validator(mode="after")
    def _links_exist(self) -> "NetworkConfig":
        if self.rate_mbit and not self.namespaces:
            raise ValueError(
                "rate_mbit is of the links that namespaces make: set namespaces to true, or leave "
                "rate_mbit out"
            )
        return self


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

    def fit_dims(self, num_nodes: int) -> ParallelDims | None:
        """The degrees on so many nodes, with fewer replicas than on all; None if none fit."""
        for name in ("dp_replicate", "dp_shard"):
            degree = getattr(self.dims, name) * num_nodes
            if degree % self.nodes == 0:
                dims = self.dims.model_copy(update={name: degree // self.nodes})
                return dims if self.global_batch % dims.num_replicas == 0 else None
        return None

    @model_validator(mode="after")
    def _nodes_divide(self) -> "TrainConfig":
        world_size = self.dims.world_size
        if world_size % self.nodes:
            raise ValueError(f"nodes {self.nodes} must divide the {world_size} workers of dims")
        if self.least_nodes > self.nodes:
            raise ValueError(
                f"min_nodes {self.min_nodes} is above nodes {self.nodes}: lower it, or raise nodes"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> "TrainConfig":
        # The loader could cut it unevenly, but the mean over replicas would weigh some samples more
        # than others.
        replicas = self.dims.num_replicas
        if self.global_batch % replicas:
            _refuse_batch(self.global_batch, replicas, f"the {replicas} replicas in dims")
        if self.accumulate > self.global_batch // replicas:
            raise ValueError(
                f"accumulate {self.accumulate} is more than the {self.global_batch // replicas} "
                "samples of a replica's batch: lower it, or raise global_batch"
            )
        return self

    @model_validator(mode="after")
    def _stages_are_fed(self) -> "TrainConfig":
        stages, parts = self.dims.pp, self.pipeline.microbatches
        if stages == 1:
            return self
        if self.accumulate > 1:
            raise ValueError(
                f"accumulate {self.accumulate} with dims.pp {stages}: a pipeline accumulates over "
                "pipeline.microbatches already: raise those and leave accumulate out"
            )
        replicas = self.dims.num_replicas
        if self.global_batch % (replicas * parts):
            # Stages exchange tensors of one shape, and the mean of unequal parts would be another.
            whose = f"{replicas} replicas x {parts} pipeline.microbatches"
            _refuse_batch(self.global_batch, replicas * parts, whose)
        if self.pipeline.schedule == "1f1b" and parts < stages:
            raise ValueError(
                f"pipeline.microbatches {parts} is less than the {stages} stages of dims.pp, which "
                "schedule 1f1b needs: raise it, or take schedule gpipe"
            )
        rounds = max(1, parts // stages)
        if self.pipeline.schedule.startswith("interleaved") and parts % rounds:
            raise ValueError(
                f"pipeline.microbatches {parts} must be a multiple of dims.pp {stages} (or fewer "
                f"than twice as many) for schedule {self.pipeline.schedule}"
            )
        return self

    @model_validator(mode="after")
    def _settings_go_together(self) -> "TrainConfig":
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.dims.tp == 1:
                raise ValueError(
                    f"{name} splits work among the workers of dims.tp, which is 1: raise dims.tp, "
                    f"or leave {name} out"
                )
        if self.compile and self.dims.pp > 1 and "zero_bubble" in self.pipeline.schedule:
            raise ValueError(
                f"compile with pipeline.schedule {self.pipeline.schedule}: it takes a backward "
                "pass apart, which a compiled one does not allow: leave compile out, or take 1f1b"
            )
        return self

    @model_validator(mode="after")
    def _synchronization_fits(self) -> "TrainConfig":
        mode, compress = self.synchronize.mode, self.synchronize.compress
        special = {
            f"synchronize.mode {mode}": mode != "step",
            f"synchronize.compress {compress}": compress != "none",
            "reproducible": self.reproducible,
        }
        chosen = [name for name, is_chosen in special.items() if is_chosen]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} exclude each other: take one of them")
        split = [n for n in ("dp_shard", "tp", "pp") if getattr(self.dims, n) > 1]
        if chosen and split:
            raise ValueError(
                f"{chosen[0]} needs whole copies of the model: set dims.{split[0]} to 1 (it is "
                f"{getattr(self.dims, split[0])}) and dims.dp_replicate to the number of workers"
            )
        if self.synchronize.is_local and self.on_nonfinite != "stop":
            raise ValueError(
                f"on_nonfinite {self.on_nonfinite} and synchronize.mode {mode}: workers that step "
                "by themselves would decide by themselves: take stop"
            )
        if mode == "asynchronous" and self.synchronize.max_staleness < self.dims.world_size - 1:
            raise ValueError(
                f"synchronize.max_staleness {self.synchronize.max_staleness} is less than the "
                f"{self.dims.world_size - 1} other workers, each of which may add a step "
                "meanwhile: raise it"
            )
        return self

    @model_validator(mode="after")
    def _virtual_ranks_fit(self) -> "TrainConfig":
        if not self.reproducible:
            return self
        virtual, world_size = self.virtual_ranks, self.dims.world_size
        if virtual & (virtual - 1):
            raise ValueError(f"virtual_ranks {virtual} must be a power of two, such as 8")
        if virtual % world_size:
            raise ValueError(
                f"virtual_ranks {virtual} must be a multiple of the {world_size} workers in dims"
            )
        if self.global_batch % virtual:
            _refuse_batch(self.global_batch, virtual, f"virtual_ranks {virtual}")
        if self.compile:
            raise ValueError(
                "compile and reproducible exclude each other: what a compiled layer runs depends "
                "on the shapes that it saw before"
            )
        if self.accumulate > 1:
            raise ValueError(
                f"accumulate {self.accumulate} and reproducible exclude each other: it computes "
                "virtual_ranks one after another already, so raise those to save memory"
            )
        return self


def _refuse_batch(global_batch: int, divisor: int, whose: str) -> NoReturn:
    below = global_batch // divisor * divisor
    raise ValueError(
        f"global_batch {global_batch} must be a multiple of {whose}: take "
        f"{f'{below} or ' if below else ''}{below + divisor}"
    )


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
