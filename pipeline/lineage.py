"""What a model was made of, as digests and tags."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rfc8785

from data.manifest import Manifest
from data.residency import Exclusion
from data.shard import Shard
from pipeline.config import Config
from pipeline.versioning import read_revision

FLOW_RUN_VARIABLE = "CONVOY_FLOW_RUN_ID"
"""Environment variable by which a flow names itself to the stages."""

_NO_RESULT = frozenset(
    {
        # They change when and how often something is written or read, never a result.
        *(
            "cache",
            "checkpoint",
            "log_every_steps",
            "max_restarts",
            "profile",
            "system_metrics_seconds",
        ),
        *("nodes", "min_nodes", "recovery", "network"),
        # They change how the same sums are computed: a run may go on in another layout.
        *("dims", "sequence_parallel", "loss_parallel", "pipeline", "accumulate"),
        *("activation_checkpointing", "compile"),
    }
)


def digest_config(config: Config) -> str:
    """SHA-256 of the whole configuration's canonical JSON, hex."""
    return _digest(config.model_dump(mode="json", by_alias=True))


def digest_training(config: Config, manifest: Manifest, readable: Sequence[Shard]) -> str:
    """The fingerprint of a training run: SHA-256 of all that its result depends on, hex."""
    return _digest(describe_training(config, manifest, readable))


def describe_training(
    config: Config, manifest: Manifest, readable: Sequence[Shard]
) -> dict[str, Any]:
    """All that a training's result depends on, as plain values; rounding apart, which is the
    layout's."""
    return {
        "manifest": manifest.digest,
        "shards": _digest([shard.digest for shard in readable]),
        "train": config.train.model_dump(mode="json", exclude=set(_NO_RESULT)),
        "workload": config.workload.module,
        "code": digest_code(config.workload.code),
    }


def digest_code(code: Path) -> str:
    """SHA-256 over the Python files of a file or folder, with their names, hex."""
    files = sorted(code.rglob("*.py")) if code.is_dir() else [code]
    content = {str(path.relative_to(code.parent)): path.read_bytes().hex() for path in files}
    return _digest(content)


def lineage_tags(
    config: Config, root: Path, manifest: Manifest, excluded: Sequence[Exclusion]
) -> dict[str, str]:
    """Tags for an MLflow run and a model version."""
    revision = read_revision(root)
    tags = {
        "convoy.dataset": config.dataset,
        "convoy.manifest": manifest.digest,
        "convoy.config": digest_config(config),
        "convoy.residency": config.residency.digest,
        "convoy.regions_read": config.site.name,
        "convoy.excluded": json.dumps([e.model_dump() for e in excluded], ensure_ascii=False),
        "convoy.num_excluded": str(sum(e.num_records for e in excluded)),
        "git.revision": revision.git,
        "dvc.lock": revision.dvc,
    }
    if flow_run := os.environ.get(FLOW_RUN_VARIABLE):
        tags["prefect.flow_run_id"] = flow_run
    return tags


def _digest(value: Any) -> str:
    # Floats and plain JSON types alone: RFC 8785 has one form for each.
    return hashlib.sha256(rfc8785.dumps(value)).hexdigest()
