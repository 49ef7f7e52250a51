"""What checkpoints there are, on this disk and in the region's store, and one of them as a file."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import AwareDatetime, BaseModel

from data.sealed_shards import open_region
from pipeline import workspace
from pipeline.borders import log_refusals
from pipeline.checks import check_site, open_workload, read_current_manifest
from pipeline.config import Config
from pipeline.errors import PipelineError
from pipeline.recording import open_log
from storage.store import open_store
from training.checkpoint_commit import Found, find_in_store, find_on_disk, merge_found, store_folder
from training.checkpoint_files import CheckpointFiles
from training.checkpoint_policy import find_best

_FOLDER = "checkpoints"


class ListedCheckpoint(BaseModel, frozen=True, extra="forbid"):
    """One committed checkpoint."""

    run: str
    """The run's directory, and its folder in the store."""
    name: str
    step: int
    time: AwareDatetime
    num_bytes: int
    loss: float | None
    layout: dict[str, int]
    """Degrees of parallelism that wrote it."""
    on_disk: bool
    in_store: bool
    best: bool
    """Whether its training loss is the lowest of its run's."""


def list_checkpoints(config: Config, root: Path) -> tuple[ListedCheckpoint, ...]:
    """All of this workspace's runs, by run and step. No key is needed, and so nothing is proved.

    Raises StoreUnavailable, CheckpointError.
    """
    return tuple(
        ListedCheckpoint(
            run=run,
            name=one.name,
            step=one.commit.step,
            time=one.commit.time,
            num_bytes=one.commit.num_bytes,
            loss=one.commit.loss,
            layout=one.commit.layout,
            on_disk=one.on_disk,
            in_store=one.in_store,
            best=one.name == find_best(found),
        )
        for run, found in sorted(_find_all(config, root).items())
        for one in found
    )


def export_checkpoint(
    config: Config, root: Path, output: Path, *, run: str | None, step: int | None, best: bool
) -> Found:
    """Write one's parameters as a safetensors file: that of a step, the best, or the newest.

    `run` may be its first letters; without it there must be one run alone. The file is not sealed,
    and is a `model` in the training region for the residency policy. Raises PipelineError,
    ResidencyError, CheckpointError.
    """
    from training.checkpoint_export import export_weights

    workload = open_workload(config, root)
    manifest = read_current_manifest(config)
    log_refusals(config, lambda: check_site(config, manifest))
    name, found = _choose_run(_find_all(config, root), run)
    chosen = _choose(found, step, best)
    written_for = chosen.commit.identity.get("manifest")
    if written_for != manifest.digest:
        raise PipelineError(
            f"checkpoint {chosen.name} is of dataset version {str(written_for)[:12]}, and "
            f"{workspace.MANIFEST} is {manifest.digest[:12]}: check out the one it was made of"
        )
    sealed = open_region(manifest, config.site, open_log(config))
    files = CheckpointFiles(root / workspace.RUNS / name / _FOLDER, sealed, name)
    with workspace.explain_disk(output):
        export_weights(files, chosen, workload, output)
    return chosen


def _find_all(config: Config, root: Path) -> dict[str, list[Found]]:
    """By run, oldest first; runs without any are left out."""
    store = open_store(config.site)
    on_disk = {path.parent.name: path for path in (root / workspace.RUNS).glob(f"*/{_FOLDER}")}
    stored = {info.name.split("/")[1] for info in store.list(store_folder("").rstrip("/"))}
    found = {
        run: merge_found(
            find_on_disk(on_disk[run]) if run in on_disk else [],
            find_in_store(store, run) if run in stored else [],
        )
        for run in on_disk.keys() | stored
    }
    return {run: ones for run, ones in found.items() if ones}


def _choose_run(found: dict[str, list[Found]], run: str | None) -> tuple[str, list[Found]]:
    """The run of these first letters; of none, that of the newest checkpoint."""
    if not found:
        raise PipelineError("there is no checkpoint: training makes them")
    if run is None:
        newest = max(found, key=lambda name: max(one.commit.time for one in found[name]))
        return newest, found[newest]
    matching = [name for name in found if name.startswith(run)]
    if len(matching) == 1:
        return matching[0], found[matching[0]]
    listed = ", ".join(sorted(found))
    raise PipelineError(f"--run {run}: name one of the runs with checkpoints: {listed}")


def _choose(found: list[Found], step: int | None, best: bool) -> Found:
    if best:
        name = find_best(found)
        found = [one for one in found if one.name == name]
    elif step is not None:
        steps = _list_steps(found)
        found = [one for one in found if one.commit.step == step]
        if not found:
            raise PipelineError(f"--step {step}: there is none; there are {steps}")
    if not found:
        raise PipelineError("--best: no checkpoint knows its training loss; name one by --step")
    return found[-1]


def _list_steps(found: Iterable[Found]) -> str:
    return ", ".join(str(one.commit.step) for one in found)
