"""Raw input to the DVC remotes of the regions and back, only where the policy lets it be.

Raw input is one DVC output, a folder. If every file of it lies in a folder that is named for a
jurisdiction, and each jurisdiction of the dataset has one, then each such folder moves by itself;
else all of it is one part, which may be only where all of its jurisdictions may be. Convoy takes
the workload's word for whose records a folder holds. DVC's list of the files, their names and
digests, goes to every remote that gets some of them: git holds the digests of the shards as well.

DVC's own push leaves out an output marked `push: false`, as this one is. So objects are added to a
remote one by one, each under its digest, the way DVC's own push and pull do it.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from data.manifest import Manifest
from data.residency import Decision
from pipeline import workspace
from pipeline.borders import count_crossings
from pipeline.checks import read_current_manifest
from pipeline.config import Config
from pipeline.errors import VersioningError
from pipeline.versioning import open_repository
from storage.access_log import AccessEntry, AccessLog, Action
from storage.region import Region

if TYPE_CHECKING:
    from dvc.repo import Repo


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


@dataclass(frozen=True)
class _Part:
    path: Path
    jurisdictions: tuple[str, ...]
    oids: tuple[str, ...]
    """What DVC calls the files."""


@dataclass(frozen=True)
class _RawInput:
    """The DVC output, at the version of dvc.lock."""

    path: Path
    oid: str
    cache: Any
    manifest: Manifest

    def split(self, listing: Any) -> tuple[_Part, ...]:
        """Its parts, by the folder's listing."""
        files = [(key, hashed.value) for key, _, hashed in listing]
        names = {name.casefold(): name for name in self.manifest.count_records()}
        folders = {key[0] if len(key) > 1 else "" for key, _ in files}
        if sorted(folder.casefold() for folder in folders) != sorted(names):
            everyone = tuple(sorted(names.values()))
            return (_Part(self.path, everyone, tuple(oid for _, oid in files)),)
        return tuple(
            _Part(
                self.path / folder,
                (names[folder.casefold()],),
                tuple(oid for key, oid in files if key[0] == folder),
            )
            for folder in sorted(folders)
        )


def push(config: Config, names: tuple[str, ...] = ()) -> Movement:
    """Add the raw input, part by part, to the remotes of the regions where it may be.

    What is there already stays. Raises VersioningError when DVC does not know the raw input that
    the manifest was made of, or a remote refuses; ResidencyError for a yearly limit.
    """
    log = AccessLog(workspace.ACCESS_LOG)
    moved: list[Moved] = []
    kept: list[Kept] = []
    with _open(config) as (repo, raw):
        parts = raw.split(_load(raw))
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
            remote = _open_remote(config, repo, region)
            for part in allowed:
                num_sent = _send(raw, remote, part.oids)
                moved.append(_move(part, region, num_sent))
                _log(config, log, region, part, None)
            # The listing last: it says that the files it names are there.
            _send(raw, remote, (raw.oid,))
    return Movement(moved=tuple(moved), kept=tuple(kept))


def pull(config: Config) -> Movement:
    """Bring the raw input that may be here, in `train.region`, from the remotes into datasets/.

    Raises VersioningError when a remote lacks a file, or a file here differs from dvc.lock.
    """
    log = AccessLog(workspace.ACCESS_LOG)
    here = config.site
    moved: list[Moved] = []
    kept: list[Kept] = []
    with _open(config) as (repo, raw):
        remotes = {
            region.name: _open_remote(config, repo, region)
            for region in (here, *(r for r in config.regions.values() if r != here))
        }
        if not raw.cache.exists(raw.oid):
            source = next((n for n, remote in remotes.items() if remote.exists(raw.oid)), None)
            if source is None:
                raise VersioningError(
                    f"no remote of {', '.join(remotes)} has the raw input of this version: run "
                    "`convoy push` where it is"
                )
            _fetch(raw, remotes[source], (raw.oid,), source)
        for part in raw.split(_load(raw)):
            refused = _refusal(config, part, here)
            if refused is not None:
                kept.append(_keep(part, here, refused))
                _log(config, log, here, part, refused)
                continue
            source = _find_source(remotes, raw, part)
            num_sent = _fetch(raw, remotes[source], part.oids, source)
            moved.append(_move(part, config.regions[source], num_sent))
            _log(config, log, config.regions[source], part, None, action="get")
        for item in moved:
            repo.checkout(targets=[str(item.path)])
    return Movement(moved=tuple(moved), kept=tuple(kept))


@contextlib.contextmanager
def _open(config: Config) -> Iterator[tuple["Repo", _RawInput]]:
    manifest = read_current_manifest(config)
    path = workspace.DATASETS / config.dataset
    with open_repository(Path.cwd()) as repo, _explained():
        known = {}
        for stage in repo.index.stages:
            for entry in (*stage.outs, *stage.deps):
                if entry.hash_info:
                    known[stage.addressing, str(entry)] = entry.hash_info.value
        oid = known.get(("ingest", str(path)))
        sharded = known.get(("shard", str(path)))
        content = hashlib.md5(manifest.content, usedforsecurity=False).hexdigest()
        if (
            oid is None
            or oid != sharded
            or content != known.get(("shard", str(workspace.MANIFEST)))
        ):
            raise VersioningError(
                f"dvc.lock does not know {path} as what {workspace.MANIFEST} was made of, and only "
                "that says whose records it holds: run `convoy run` or `dvc repro` first"
            )
        [out] = repo.find_outs_by_path(str(path.absolute()))
        yield repo, _RawInput(path, oid, out.cache, manifest)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """A remote's own errors are of many kinds, and their text may repeat what was sent."""
    try:
        yield
    except OSError as error:
        raise VersioningError(
            f"a DVC remote or its cache refuses ({type(error).__name__}: {error.strerror}): check "
            "params.yaml: versioning.remotes, the disk and the credentials"
        ) from None


def _load(raw: _RawInput) -> Any:
    from dvc_data.hashfile import load
    from dvc_data.hashfile.hash_info import HashInfo

    if not raw.cache.exists(raw.oid):
        raise VersioningError(
            f"the DVC cache lacks {raw.path} of this version: run `convoy pull`, or `convoy run`"
        )
    listing = load(raw.cache, HashInfo("md5", raw.oid))
    if not raw.oid.endswith(".dir"):
        raise VersioningError(f"{raw.path} is no folder: ingest writes one")
    return listing


def _open_remote(config: Config, repo: "Repo", region: Region) -> Any:
    """The remote's objects. Options and credentials may stand in .dvc/config.local, under the name
    convoy-REGION.
    """
    name = f"convoy-{region.name}"
    url = config.versioning.remotes.get(region.name)
    if url is None:
        url = str((workspace.STATE / "dvc" / region.name).absolute())
    elif "://" not in url:
        url = str(Path(url).absolute())
    remotes = repo.config["remote"]
    remotes[name] = {**remotes.get(name, {}), "url": url}
    return repo.cloud.get_remote_odb(name=name)


def _send(raw: _RawInput, remote: Any, oids: tuple[str, ...]) -> int:
    """Add to a remote what it lacks; how many files that were."""
    missing = [oid for oid in dict.fromkeys(oids) if not remote.exists(oid)]
    for oid in missing:
        if not _is_whole(raw.cache, oid):
            raise VersioningError(
                f"the DVC cache lacks a file of {raw.path}, or it was changed there: run "
                "`convoy run`, or `convoy pull`"
            )
    _add(raw.cache, remote, missing)
    return len(missing)


def _fetch(raw: _RawInput, remote: Any, oids: tuple[str, ...], region: str) -> int:
    """Add to the cache what it lacks, and believe no remote; how many files that were."""
    missing = [oid for oid in dict.fromkeys(oids) if not raw.cache.exists(oid)]
    if not all(map(remote.exists, missing)):
        raise VersioningError(
            f"files of {raw.path} are neither in the DVC cache nor in the remote of region "
            f"{region}: run `convoy push` where they are"
        )
    _add(remote, raw.cache, missing)
    broken = [oid for oid in missing if not _is_whole(raw.cache, oid)]
    for oid in broken:
        raw.cache.delete(oid)
    if broken:
        raise VersioningError(
            f"{len(broken)} files of {raw.path} in the remote of region {region} are not what "
            "their digests say: they were changed there. Remove them there, and run `convoy push` "
            "where they are whole"
        )
    return len(missing)


def _add(source: Any, target: Any, oids: Sequence[str]) -> None:
    target.add([source.oid_to_path(oid) for oid in oids], source.fs, list(oids))


def _is_whole(cache: Any, oid: str) -> bool:
    """DVC's own check trusts what is marked read-only."""
    if not cache.exists(oid):
        return False
    with Path(cache.oid_to_path(oid)).open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest() == oid.removesuffix(".dir")


def _find_source(remotes: dict[str, Any], raw: _RawInput, part: _Part) -> str:
    """The first region whose remote has what the cache lacks; the present one comes first."""
    needed = [oid for oid in part.oids if not raw.cache.exists(oid)]
    return next(
        (name for name, remote in remotes.items() if all(map(remote.exists, needed))),
        next(iter(remotes)),
    )


def _regions(config: Config, names: tuple[str, ...]) -> tuple[Region, ...]:
    return tuple(config.find_region(name) for name in names or config.regions)


def _refusal(config: Config, part: _Part, region: Region) -> Decision | None:
    """Why the part may not be in the region: of the first jurisdiction that keeps it out."""
    for jurisdiction in part.jurisdictions:
        decision = config.residency.decide(jurisdiction, "raw", region.name)
        if not decision.allowed:
            return decision
    return None


def _count(
    config: Config, manifest: Manifest, region: Region, parts: list[_Part], log: AccessLog
) -> None:
    of = {jurisdiction for part in parts for jurisdiction in part.jurisdictions}
    count_crossings(config, manifest, [region], log, "raw", of)


def _log(
    config: Config,
    log: AccessLog,
    region: Region,
    part: _Part,
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


def _keep(part: _Part, region: Region, decision: Decision) -> Kept:
    return Kept(
        region=region.name,
        path=part.path,
        jurisdictions=part.jurisdictions,
        reason=decision.reason,
    )


def _move(part: _Part, region: Region, num_sent: int) -> Moved:
    return Moved(
        region=region.name,
        path=part.path,
        jurisdictions=part.jurisdictions,
        num_files=len(part.oids),
        num_sent=num_sent,
    )
