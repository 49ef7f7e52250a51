"""All that launched workers need to know, as one file that holds no secret."""

from pathlib import Path

from pydantic import BaseModel

from data.cache import SealedCache
from data.manifest import Manifest, read_manifest
from data.residency import Residency
from data.sealed_shards import SealedShards, open_region
from data.shard import Shard
from storage.access_log import AccessLog
from storage.log_checkpoint import AuditConfig
from storage.region import Region
from training.config import TrainConfig

STEPS_FILE = "steps.jsonl"
WEIGHTS_FILE = "model.safetensors"
EXIT_CODES_VARIABLE = "CONVOY_EXIT_CODES"
"""Environment variable that tells the agent where to leave the ranks' exit codes."""


class TrainSpec(BaseModel, frozen=True, extra="forbid"):
    """One training run, as its workers see it."""

    root: Path
    """The workspace, where the workload is imported from."""
    workload: str
    config: TrainConfig
    primary: str
    """The metric that will decide; a rehearsal before the first step looks whether it is there."""
    manifest: Path
    region: Region
    residency: Residency
    access_log: Path
    audit: AuditConfig = AuditConfig()
    run_directory: Path
    """Checkpoints, logs, steps and weights of this run; kept until the run is another one."""
    fingerprint: str
    """Digest of all that the result depends on: a checkpoint of another one is refused."""
    tracking_uri: str
    mlflow_run_id: str

    def open_shards(self) -> tuple[SealedShards, tuple[Shard, ...]]:
        """The site's sealed shards, and those for training that it may read."""
        manifest: Manifest = read_manifest(self.manifest)
        readable, _ = self.residency.split_readable(manifest.of("train"), self.region.name)
        kept = self.config.cache
        cache = SealedCache(self.root / kept.directory, kept.limit_bytes) if kept else None
        return open_region(manifest, self.region, self.open_log(), cache=cache), readable

    def open_log(self) -> AccessLog:
        """The access log; a handle on the one writer of this process."""
        return AccessLog(self.access_log, self.audit, self.residency.digest)
