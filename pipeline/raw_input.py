"""The raw input as DVC keeps it: one output, a folder, in the cache here and in remotes.

DVC's own push leaves out an output marked `push: false`, as this one is. So objects are added to a
remote one by one, each under its digest, the way DVC's own push and pull do it.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.manifest import Manifest
from pipeline import workspace
from pipeline.checks import read_current_manifest
from pipeline.config import Config
from pipeline.errors import VersioningError
from pipeline.versioning import open_repository
from storage.region import Region

if TYPE_CHECKING:
    from dvc.repo import Repo


@dataclass(frozen=True)
class Part:
    """Files of the raw input that move together, and whose records they hold."""

    path: Path
    jurisdictions: tuple[str, ...]
    oids: tuple[str, ...]
    """What DVC calls the files."""


@dataclass(frozen=True)
class RawInput:
    """The DVC output, at the version of dvc.lock."""

    path: Path
    oid: str
    cache: Any
    """DVC's object database."""
    manifest: Manifest

    def split(self) -> tuple[Part, ...]:
        """Its parts, by the folder's listing. Raises VersioningError when the cache lacks it."""
        files = [(key, hashed.value) for key, _, hashed in self._load_listing()]
        names = {name.casefold(): name for name in self.manifest.count_records()}
        folders = {key[0] if len(key) > 1 else "" for key, _ in files}
        if sorted(folder.casefold() for folder in folders) != sorted(names):
            everyone = tuple(sorted(names.values()))
            return (Part(self.path, everyone, tuple(oid for _, oid in files)),)
        return tuple(
            Part(
                self.path / folder,
                (names[folder.casefold()],),
                tuple(oid for key, oid in files if key[0] == folder),
            )
            for folder in sorted(folders)
        )

    def send(self, remote: Any, oids: tuple[str, ...]) -> int:
        """Add to a remote what it lacks; how many files that were.

        Raises VersioningError when the cache lacks one of them, or holds it changed.
        """
        missing = [oid for oid in dict.fromkeys(oids) if not remote.exists(oid)]
        for oid in missing:
            if not self._has_whole(oid):
                raise VersioningError(
                    f"the DVC cache lacks a file of {self.path}, or it was changed there: run "
                    "`convoy run`, or `convoy pull`"
                )
        _add(self.cache, remote, missing)
        return len(missing)

    def fetch(self, remote: Any, oids: tuple[str, ...], region: str) -> int:
        """Add to the cache what it lacks, and believe no remote; how many files that were.

        Raises VersioningError when the region's remote lacks one of them, or holds it changed.
        """
        missing = self.list_missing(oids)
        if not all(map(remote.exists, missing)):
            raise VersioningError(
                f"files of {self.path} are neither in the DVC cache nor in the remote of region "
                f"{region}: run `convoy push` where they are"
            )
        _add(remote, self.cache, missing)
        broken = [oid for oid in missing if not self._has_whole(oid)]
        for oid in broken:
            self.cache.delete(oid)
        if broken:
            raise VersioningError(
                f"{len(broken)} files of {self.path} in the remote of region {region} are not what "
                "their digests say: they were changed there. Remove them there, and run "
                "`convoy push` where they are whole"
            )
        return len(missing)

    def list_missing(self, oids: Iterable[str]) -> list[str]:
        """Those that the cache lacks, each once."""
        return [oid for oid in dict.fromkeys(oids) if not self.cache.exists(oid)]

    def _load_listing(self) -> Any:
        from dvc_data.hashfile import load
        from dvc_data.hashfile.hash_info import HashInfo

        if not self.cache.exists(self.oid):
            raise VersioningError(
                f"the DVC cache lacks {self.path} of this version: run `convoy pull`, or "
                "`convoy run`"
            )
        listing = load(self.cache, HashInfo("md5", self.oid))
        if not self.oid.endswith(".dir"):
            raise VersioningError(f"{self.path} is no folder: ingest writes one")
        return listing

    def _has_whole(self, oid: str) -> bool:
        """DVC's own check trusts what is marked read-only."""
        if not self.cache.exists(oid):
            return False
        with Path(self.cache.oid_to_path(oid)).open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        return digest.hexdigest() == oid.removesuffix(".dir")


@contextlib.contextmanager
def open_raw_input(config: Config) -> Iterator[tuple["Repo", RawInput]]:
    """DVC's repository and the raw input that the manifest was made of.

    Raises VersioningError when DVC does not know it, and for what a remote refuses inside.
    """
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
        yield repo, RawInput(path, oid, out.cache, manifest)


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


def open_remote(config: Config, repo: "Repo", region: Region) -> Any:
    """The objects of a region's remote, as DVC's object database.

    Options and credentials may stand in .dvc/config.local, under the name convoy-REGION.
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


def _add(source: Any, target: Any, oids: Sequence[str]) -> None:
    target.add([source.oid_to_path(oid) for oid in oids], source.fs, list(oids))
