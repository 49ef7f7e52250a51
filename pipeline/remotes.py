"""Raw input to the DVC remotes of the regions and back, only where the policy lets it be.

Raw input is one DVC output, a folder. If every file of it lies in a folder that is named for a
jurisdiction, and each jurisdiction of the dataset has one, then each such folder moves by itself;
else all of it is one part, which may be only where all of its jurisdictions may be. Convoy takes
the workload's word for whose records a folder holds. DVC's list of the files, their names and
digests, goes to every remote that gets some of them: git holds the digests of the shards as well.
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from data.manifest import Manifest
from data.residency import Decision
from pipeline import workspace
from pipeline.borders import count_crossings
from pipeline.config import Config
from pipeline.errors import VersioningError
from pipeline.raw_input import Part, RawInput, open_raw_input, open_remote
from storage.access_log import AccessEntry, AccessLog, Action
from storage.region import Region


class Moved(BaseModel, frozen=True, extra="forbid"):
    """A part of the raw input that is in a region's remote, or came from it."""

    region: str
    path: Path
    jurisdictions: tuple[str, ...]
    num_files: int
    num_sent: int
    """Files that were not there before."""


class Kept(BaseModel, frozen=True, extra="forbid"):
    """A part of the raw input that may not be in a region."""

    region: str
    path: Path
    jurisdictions: tuple[str, ...]
    reason: str


class Movement(BaseModel, frozen=True, extra="forbid"):
    """What moved, and what may not."""

    moved: tuple[Moved, ...]
    kept: tuple[Kept, ...]

    @property
    def homeless(self) -> tuple[Path, ...]:
        """Parts that no region took."""
        taken = {moved.path for moved in self.moved}
        return tuple(dict.fromkeys(kept.path for kept in self.kept if kept.path not in taken))


def push(config: Config, names: tuple[str, ...] = ()) -> Movement:
    """Add the raw input, part by part, to the remotes of the regions where it may be.

    What is there already stays. Raises VersioningError when DVC does not know the raw input that
    the manifest was made of, or a remote refuses; ResidencyError for a yearly limit.
    """
    log = AccessLog(workspace.ACCESS_LOG)
    moved: list[Moved] = []
    kept: list[Kept] = []
    with open_raw_input(config) as (repo, raw):
        parts = raw.split()
        for region in _regions(config, names):
            allowed = []
            for part in parts:
                refused = _refusal(config, part, region)
                if refused is None:
                    allowed.append(part)
                else:
                    kept.append(_keep(part, region, refused))
                    _log(config, log, region, part, refused)
            if not allowed:
                continue
            _count(config, raw.manifest, region, allowed, log)
            remote = open_remote(config, repo, region)
            for part in allowed:
                num_sent = raw.send(remote, part.oids)
                moved.append(_move(part, region, num_sent))
                _log(config, log, region, part, None)
            # The listing last: it says that the files it names are there.
            raw.send(remote, (raw.oid,))
    return Movement(moved=tuple(moved), kept=tuple(kept))


def pull(config: Config) -> Movement:
    """Bring the raw input that may be here, in `train.region`, from the remotes into datasets/.

    Raises VersioningError when a remote lacks a file, or a file here differs from dvc.lock.
    """
    log = AccessLog(workspace.ACCESS_LOG)
    here = config.site
    moved: list[Moved] = []
    kept: list[Kept] = []
    with open_raw_input(config) as (repo, raw):
        remotes = {
            region.name: open_remote(config, repo, region)
            for region in (here, *(r for r in config.regions.values() if r != here))
        }
        if not raw.cache.exists(raw.oid):
            source = next((n for n, remote in remotes.items() if remote.exists(raw.oid)), None)
            if source is None:
                raise VersioningError(
                    f"no remote of {', '.join(remotes)} has the raw input of this version: run "
                    "`convoy push` where it is"
                )
            raw.fetch(remotes[source], (raw.oid,), source)
        for part in raw.split():
            refused = _refusal(config, part, here)
            if refused is not None:
                kept.append(_keep(part, here, refused))
                _log(config, log, here, part, refused)
                continue
            source = _find_source(remotes, raw, part)
            num_sent = raw.fetch(remotes[source], part.oids, source)
            moved.append(_move(part, config.regions[source], num_sent))
            _log(config, log, config.regions[source], part, None, action="get")
        for item in moved:
            repo.checkout(targets=[str(item.path)])
    return Movement(moved=tuple(moved), kept=tuple(kept))


def _find_source(remotes: dict[str, Any], raw: RawInput, part: Part) -> str:
    """The first region whose remote has what the cache lacks; the present one comes first."""
    needed = raw.list_missing(part.oids)
    return next(
        (name for name, remote in remotes.items() if all(map(remote.exists, needed))),
        next(iter(remotes)),
    )


def _regions(config: Config, names: tuple[str, ...]) -> tuple[Region, ...]:
    return tuple(config.find_region(name) for name in names or config.regions)


def _refusal(config: Config, part: Part, region: Region) -> Decision | None:
    """Why the part may not be in the region: of the first jurisdiction that keeps it out."""
    for jurisdiction in part.jurisdictions:
        decision = config.residency.decide(jurisdiction, "raw", region.name)
        if not decision.allowed:
            return decision
    return None


def _count(
    config: Config, manifest: Manifest, region: Region, parts: list[Part], log: AccessLog
) -> None:
    of = {jurisdiction for part in parts for jurisdiction in part.jurisdictions}
    count_crossings(config, manifest, [region], log, "raw", of)


def _log(
    config: Config,
    log: AccessLog,
    region: Region,
    part: Part,
    refused: Decision | None,
    action: Action = "put",
) -> None:
    log.append(
        AccessEntry(
            region=region.name,
            action="refuse" if refused else action,
            object=f"dvc/{part.path}",
            artifact="raw",
            policy_digest=config.residency.digest,
            decision="refused" if refused else "allowed",
            reason=refused.reason if refused else f"raw input of {', '.join(part.jurisdictions)}",
        )
    )


def _keep(part: Part, region: Region, decision: Decision) -> Kept:
    return Kept(
        region=region.name,
        path=part.path,
        jurisdictions=part.jurisdictions,
        reason=decision.reason,
    )


def _move(part: Part, region: Region, num_sent: int) -> Moved:
    return Moved(
        region=region.name,
        path=part.path,
        jurisdictions=part.jurisdictions,
        num_files=len(part.oids),
        num_sent=num_sent,
    )
