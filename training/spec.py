"""All that launched workers need to know, as one file that holds no secret."""

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel

from data.cache import SealedCache
from data.manifest import Manifest, read_manifest
from data.residency import Residency
from data.sealed_shards import SealedShards, open_region
from data.shard import Shard, Split
from storage.access_log import AccessLog
from storage.log_checkpoint import AuditConfig
from storage.region import Region
from training.config import TrainConfig
from training.recovery_config import NetworkConfig, RecoveryConfig

SPEC_FILE = "spec.json"
STEPS_FILE = "steps.jsonl"
"""The step log of a run, of all ranks."""
NONFINITE_FILE = "nonfinite.jsonl"
"""Batches that were left out because their loss or gradient was no number."""
WEIGHTS_FILE = "model.safetensors"


class WorkerSpec(BaseModel, frozen=True, extra="forbid"):
    """What any launched workers need, and what their supervisor needs to know of them."""

    progress_file: ClassVar[str]
    """JSON lines that rank 0 adds to in the run directory, each with its `step`."""
    after_kill: ClassVar[str]
    """What the user can do when the workers were killed too often."""

    root: Path
    """The workspace, where the workload is imported from."""
    workload: str
    manifest: Path
    region: Region
    residency: Residency
    access_log: Path
    audit: AuditConfig = AuditConfig()
    run_directory: Path
    """What the workers leave for the supervisor: failures, exit codes, logs, results."""
    mlflow_run_id: str

    @property
    def worker(self) -> str:
        """The module that each rank runs, with the path of this spec's file."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        raise NotImplementedError

    @property
    def max_restarts(self) -> int:
        raise NotImplementedError

    @property
    def num_peers(self) -> int:
        """Ranks, one after another, that have the same work in each step."""
        return self.num_workers

    @property
    def waits_inside(self) -> bool:
        """Whether ranks wait for each other inside their passes through the model."""
        return False

    @property
    def nodes(self) -> int:
        """Nodes that the workers are spread over."""
        return 1

    @property
    def min_nodes(self) -> int:
        """Fewest nodes to go on with."""
        return 1

    @property
    def recovery(self) -> RecoveryConfig:
        return RecoveryConfig()

    @property
    def network(self) -> NetworkConfig:
        return NetworkConfig()

    def fit(self, num_nodes: int) -> Self | None:
        """The same work on so many nodes; None where it cannot be cut for them."""
        return self if num_nodes == self.nodes else None

    def open_log(self) -> AccessLog:
        """The access log; a handle on the one writer of this process."""
        return AccessLog(self.access_log, self.audit, self.residency.digest)

    def read_readable(self, split: Split) -> tuple[Manifest, tuple[Shard, ...]]:
        """The manifest, and its shards of a split that the site may read."""
        manifest = read_manifest(self.manifest)
        return manifest, self.residency.split_readable(manifest.of(split), self.region.name)[0]


class TrainSpec(WorkerSpec, frozen=True, extra="forbid"):
    """One training run, as its workers see it."""

    progress_file: ClassVar[str] = STEPS_FILE
    after_kill: ClassVar[str] = "the last commit is whole: `convoy stage train` goes on from it"

    config: TrainConfig
    primary: str
    """The metric that will decide; a rehearsal before the first step looks whether it is there."""
    fingerprint: str
    """Digest of all that the result depends on: a checkpoint of another one is refused."""
    identity: dict[str, Any] = {}
    """The same, to be read: what a refusal compares."""
    fencing_token: int = 0
    """Which world this is, of two that believe they are the run."""
    life: int | None = None
    """Which start of a replica this is, where replicas come and go in one world."""
    lacking_nodes: int = 0
    """Nodes that the run is to have more than this world: it makes way when they are back."""
    tracking_uri: str
    only_shards: frozenset[str] | None = None
    """Names of the shards to train on, of those that the site may read; null for all."""

    @property
    def worker(self) -> str:
        return "training.hot_worker" if self.is_hot else "training.worker"

    @property
    def is_hot(self) -> bool:
        """Whether each worker is a replica that comes and goes while the others go on."""
        return self.config.recovery.mode == "hot"

    @property
    def num_workers(self) -> int:
        return self.config.dims.world_size

    @property
    def num_peers(self) -> int:
        return self.num_workers // self.config.dims.pp  # stages are the outermost axis

    @property
    def waits_inside(self) -> bool:
        return self.config.dims.is_sharded

    @property
    def max_restarts(self) -> int:
        return self.config.max_restarts

    @property
    def nodes(self) -> int:
        return self.config.nodes

    @property
    def min_nodes(self) -> int:
        return self.config.least_nodes

    @property
    def least_replicas(self) -> int:
        """Of a hot world: fewest replicas that make a step."""
        return self.config.least_replicas

    @property
    def recovery(self) -> RecoveryConfig:
        return self.config.recovery

    @property
    def network(self) -> NetworkConfig:
        return self.config.network

    def fit(self, num_nodes: int) -> Self | None:
        if self.is_hot:
            return self  # the replicas that are there share the batch
        dims = self.config.fit_dims(num_nodes)
        if dims is None:
            return None
        fewer = {"dims": dims, "nodes": num_nodes, "min_nodes": None}
        config = self.config.model_copy(update=fewer)
        lacking = {"lacking_nodes": self.nodes - num_nodes}
        return self.model_copy(update={"config": config} | lacking)

    def open_shards(self) -> tuple[SealedShards, tuple[Shard, ...]]:
        """The site's sealed shards, and those for training that it may read."""
        manifest, readable = self.read_readable("train")
        if self.only_shards is not None:
            readable = tuple(shard for shard in readable if shard.name in self.only_shards)
        kept = self.config.cache
        cache = SealedCache(self.root / kept.directory, kept.limit_bytes) if kept else None
        sealed = open_region(
            manifest, self.region, self.open_log(), cache=cache, verify=self.config.verify
        )
        return sealed, readable


class EvaluationSpec(WorkerSpec, frozen=True, extra="forbid"):
    """One scoring of a trained model on the held-out shards, as its workers see it."""

    progress_file: ClassVar[str] = "progress.jsonl"
    after_kill: ClassVar[str] = "nothing is lost: run `convoy stage evaluate` again"

    weights: Path
    model: dict[str, Any]
    """Keyword arguments of the workload's model()."""
    batch: int
    world_size: int
    sharded: bool
    """Whether the workers hold the parameters in parts, as in training, or each of them all."""
    restarts: int

    @property
    def worker(self) -> str:
        return "training.evaluation_worker"

    @property
    def num_workers(self) -> int:
        return self.world_size

    @property
    def max_restarts(self) -> int:
        return self.restarts

    def open_shards(self) -> tuple[SealedShards, tuple[Shard, ...]]:
        """The site's sealed shards, and those held out that it may read."""
        manifest, readable = self.read_readable("holdout")
        return open_region(manifest, self.region, self.open_log()), readable


def rank_steps_file(rank: int | str) -> str:
    """The name of one rank's own step log."""
    return f"steps-{rank}.jsonl"


def trace_file(rank: int | str) -> str:
    """The name of one rank's profile."""
    return f"trace-{rank}.json.gz"


def read_fencing_token(run_directory: Path) -> int:
    """Of the world that was started last; 0 before the first."""
    path = run_directory / SPEC_FILE
    if not path.exists():
        return 0
    return int(json.loads(path.read_bytes()).get("fencing_token", 0))
