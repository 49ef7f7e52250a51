"""The stages: each one function `Config -> Result`, for plain Python, DVC and Prefect alike.

A stage reads its inputs from the workspace (the current directory), replaces its output directory
whole, and returns the same small noun that it left there.
"""

import csv
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel

from data.manifest import Manifest
from data.record import Record
from data.residency import Exclusion
from data.sealed_shards import open_region
from data.shard import Shard
from data.sharding import check_record, write_shards
from data.sources import SourceError
from data.upload import UploadReceipt, check_placed, read_receipt, upload_region
from pipeline import workspace
from pipeline.borders import count_crossings, log_exclusions, log_made, log_refusals
from pipeline.checks import (
    check_ingest,
    check_jurisdictions,
    check_network,
    check_placeable,
    check_regions,
    check_site,
    open_workload,
    read_current_manifest,
)
from pipeline.config import Config
from pipeline.errors import PipelineError, WorkspaceError
from pipeline.lineage import digest_training, lineage_tags
from pipeline.machine import hold_nodes
from pipeline.progress import Transfer, describe_seconds, report, report_event
from pipeline.recording import open_log, recorded
from pipeline.runs import AWAY_SECONDS, FLUSH_SECONDS, is_standing, open_run, result_files
from pipeline.specs import evaluation_spec, train_spec
from pipeline.versioning import check_repository
from storage.access_log import AccessEntry
from training.account import Account
from training.evaluate import Metrics
from training.goodput import Goodput, Stretch, describe_goodput, measure_goodput
from training.incidents import Incident, Notice
from training.outbox import MetricLogger, deliver_left, open_outbox
from training.plans import check_plans
from training.registry import ModelVersion
from training.spec import STEPS_FILE, WEIGHTS_FILE
from training.supervisor import run_workers
from training.system_metrics import SystemMeter
from training.workload import Sums


class RawInput(BaseModel, frozen=True, extra="forbid"):
    """What `ingest` brought."""

    path: Path
    num_files: int
    num_bytes: int


class Placement(BaseModel, frozen=True, extra="forbid"):
    """What `upload` left: one receipt a region."""

    receipts: tuple[UploadReceipt, ...]


class TrainReport(BaseModel, frozen=True, extra="forbid"):
    """How the training went."""

    fingerprint: str
    mlflow_run_id: str
    steps: int
    world_size: int
    num_records: dict[str, int]
    """Training records that the site read, by jurisdiction."""
    epochs: float
    """How often each of them was used; a fraction is the part of the last epoch. No batch is cut
    and no record left out where their number does not divide: a batch may span two epochs."""
    excluded: tuple[Exclusion, ...]
    """Training records that it may not read."""
    final_loss: float
    samples_per_second: float
    resumed: bool
    """Whether it went on from a checkpoint of an earlier, killed call."""
    incidents: tuple[Incident, ...]
    notices: tuple[Notice, ...] = ()
    """What else is worth knowing: slow ranks, worlds of another size."""
    stretches: tuple[Stretch, ...] = ()
    """Where the time went, from the first call of this run to its end."""
    goodput: Goodput | None = None


def ingest(config: Config) -> RawInput:
    """Bring the raw input into datasets/, by the workload's ingest() or as a copy of a source."""
    workload = open_workload(config, Path.cwd())
    check_ingest(config, workload)
    target = workspace.DATASETS / config.dataset
    with workspace.replace_directory(target) as fresh:
        if config.ingest.source is None:
            workload.ingest(fresh, config.ingest.params)
        else:
            workspace.copy_into(config.ingest.source, fresh, "params.yaml: ingest.source")
        sizes = [path.stat().st_size for path in fresh.rglob("*") if path.is_file()]
        if not sum(sizes):
            raise PipelineError(f"ingest brought no byte into {target}: the dataset is empty")
    return RawInput(path=target, num_files=len(sizes), num_bytes=sum(sizes))


@recorded
def shard(config: Config) -> Manifest:
    """Group the records by jurisdiction into Arrow files, and write the manifest last."""
    workload = open_workload(config, Path.cwd())
    source = workspace.DATASETS / config.dataset
    if not source.is_dir():
        raise WorkspaceError(f"{source} is missing: run `convoy stage ingest`")
    unknown: Counter[str] = Counter()
    with workspace.replace_directory(workspace.MANIFEST.parent) as fresh:
        directory = fresh / workspace.SHARDS.name
        directory.mkdir()
        records = _known(workload.records(source), config, unknown)
        shards = write_shards(records, directory, config.shard)
        log_refusals(config, lambda: check_jurisdictions(unknown))
        if not shards:
            raise PipelineError(f"the workload found no record in {source}: the dataset is empty")
        manifest = Manifest(dataset=config.dataset, shards=shards)
        (fresh / workspace.MANIFEST.name).write_bytes(manifest.content)
    return manifest


def _named(records: Iterator[Record], config: Config) -> Iterator[Record]:
    """The same; an error in a copy of the user's file names that file too."""
    try:
        yield from records
    except SourceError as error:
        if config.ingest.source is None:
            raise
        raise SourceError(
            f"{error} (in {config.ingest.source}, of which this is Convoy's copy; then run again)"
        ) from None


def _known(records: Iterator[Record], config: Config, unknown: Counter[str]) -> Iterator[Record]:
    """Records of jurisdictions that the policy names; the others are counted, to be refused."""
    total = 0
    for number, record in enumerate(_named(records, config)):
        total = number + 1
        if total % 10_000 == 0:
            report("shard", total, None, "records")
        check_record(record, number)
        if record.jurisdiction not in config.residency.jurisdictions:
            unknown[record.jurisdiction] += 1
        elif not unknown:
            yield record
    report("shard", total, total, "records")


@recorded
def upload(config: Config) -> Placement:
    """Seal each shard for every region where it may live, and place it there."""
    manifest = read_current_manifest(config)
    log = open_log(config)
    log_refusals(config, lambda: check_placeable(config, manifest))
    log_refusals(config, lambda: check_site(config, manifest))
    checks = check_regions(config, log)
    count_crossings(config, manifest, config.upload_regions, log)
    transfer = _start_transfer(config, manifest)

    def count(shard: Shard, sent: bool) -> None:
        if sent:
            transfer.finish(1)
        else:
            transfer.skip(1, shard.num_bytes)

    receipts: list[UploadReceipt] = []
    with workspace.replace_directory(workspace.RECEIPTS) as fresh:
        for region in config.upload_regions:
            receipt = upload_region(
                manifest,
                workspace.SHARDS,
                region,
                config.residency,
                log,
                count,
                transfer.advance,
                checks[region.name],
            )
            receipt.write(fresh / f"{region.name}.json")
            receipts.append(receipt)
    return Placement(receipts=tuple(receipts))


def _start_transfer(config: Config, manifest: Manifest) -> Transfer:
    """Of all shards to all regions where they may live."""
    sizes: list[int] = []
    for region in config.upload_regions:
        allowed = {
            jurisdiction
            for jurisdiction in manifest.count_records()
            if config.residency.decide(jurisdiction, "shard", region.name).allowed
        }
        sizes += [shard.num_bytes for shard in manifest.shards if shard.jurisdiction in allowed]
    return Transfer("upload", "shards", len(sizes), sum(sizes))


@recorded
def train(config: Config) -> TrainReport:
    """Train under torchrun on the shards that the site may read; a killed call is resumed, and one
    that came to its end before DVC knew of it gives what it left."""
    root = Path.cwd()
    if config.registration.require_clean_git:
        check_repository(root, require_clean=True)
    check_plans(open_workload(config, root), config.train)
    check_network(config)
    manifest = read_current_manifest(config)
    receipt = read_receipt(workspace.RECEIPTS / f"{config.site.name}.json", manifest)
    readable, excluded = log_refusals(config, lambda: check_site(config, manifest))
    log = open_log(config)
    log_exclusions(config, manifest, excluded, log)
    check_placed(receipt, open_region(manifest, config.site, log).store)
    if is_standing(config, root, manifest, readable):
        steps = config.train.steps
        report("train", steps, steps, "steps", "came to its end before: its result stands")
        return read_train_report()
    with (
        hold_nodes(config.train.nodes, config.schedule.wait_seconds, "train"),
        open_run(config, root, manifest, readable, excluded) as run,
    ):
        log_made(config, "checkpoint", run.fingerprint, readable, log)
        log_made(config, "metrics", run.mlflow_run_id, readable, log)
        spec = train_spec(config, root, run)
        num_workers = config.train.dims.world_size
        report("train", 0, config.train.steps, "steps", f"starting {num_workers} workers")
        every = config.train.system_metrics_seconds
        meter = SystemMeter(run.outbox, run.directory, every) if every else nullcontext()
        with MetricLogger(run.outbox, config.tracking_uri) as logger, meter:

            def follow(line: dict[str, float]) -> None:
                _report_step(line, config.train.steps)
                logger.log(line)

            account = Account(lambda event: report_event("train", event.message), run.directory)
            try:
                run_workers(spec, follow, account, after_step=run.outbox.last_step)
            finally:
                account.end()
            lines = [json.loads(x) for x in (run.directory / STEPS_FILE).read_text().splitlines()]
            goodput = measure_goodput(account.stretches, lines)
            logger.log({"step": config.train.steps, **describe_goodput(goodput)})
        result = TrainReport(
            fingerprint=run.fingerprint,
            mlflow_run_id=run.mlflow_run_id,
            steps=config.train.steps,
            world_size=config.train.dims.world_size,
            num_records=_count(readable),
            epochs=config.train.steps
            * config.train.global_batch
            / sum(shard.num_records for shard in readable),
            excluded=tuple(excluded),
            final_loss=lines[-1]["loss"],
            samples_per_second=lines[-1]["samples_per_second"],
            resumed=run.resumed,
            incidents=account.incidents,
            notices=account.notices,
            stretches=account.stretches,
            goodput=goodput,
        )
        with workspace.replace_directory(workspace.TRAINED) as fresh:
            for path in result_files(run.directory):
                shutil.copy(path, fresh)
            _write_curve(fresh / "loss.csv", lines)
            workspace.write_result(fresh / "report.json", result)
    return result


def _report_step(line: dict[str, float], total: int) -> None:
    step = int(line["step"])
    note = f"loss {line['loss']:.4f}, {line['samples_per_second']:.0f} samples/s"
    if step < total:
        note += f", {describe_seconds((total - step) * line['step_seconds'])} left"
    report("train", step, total, "steps", note)


def _count(shards: tuple[Shard, ...]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for shard in shards:
        counts[shard.jurisdiction] += shard.num_records
    return dict(sorted(counts.items()))


def _write_curve(path: Path, lines: list[dict[str, float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "lr"])
        writer.writerows([int(line["step"]), line["loss"], line["lr"]] for line in lines)


@recorded
def evaluate(config: Config) -> Metrics:
    """Score the model and the baselines on the held-out records that the site may read."""
    from training.evaluate import evaluate as score

    root = Path.cwd()
    workload = open_workload(config, root)
    manifest = read_current_manifest(config)
    trained, _ = _read_current_training(config, manifest)
    site, dims = config.site.name, config.train.dims
    readable, excluded = log_refusals(
        config, lambda: config.residency.split_readable(manifest.of("holdout"), site)
    )
    sealed = open_region(manifest, config.site, open_log(config))
    done = 0

    def count(shard: Shard) -> None:
        nonlocal done
        done += 1
        report("evaluate", done, len(readable), "shards", shard.name)

    num_workers = config.evaluate.workers or (dims.world_size if dims.is_sharded else 1)
    measured = None
    if num_workers > 1:
        measured = _score_by_workers(config, root, trained.mlflow_run_id, num_workers)
    metrics = score(
        workload,
        workspace.TRAINED / WEIGHTS_FILE,
        config.train.model,
        sealed,
        config.residency.split_readable(manifest.of("train"), site)[0],
        readable,
        excluded,
        config.evaluate,
        trained.fingerprint,
        measured,
        count,
    ).model_copy(update={"training_loss": _read_training_loss()})
    with workspace.replace_directory(workspace.EVALUATED) as fresh:
        overall = dict(metrics.overall.model) | dict(metrics.overall.baselines)
        (fresh / "metrics.json").write_text(json.dumps(overall, indent=2) + "\n")
        workspace.write_result(fresh / "evaluation.json", metrics)
    held_out = {f"holdout.{name}": value for name, value in metrics.overall.model.items()}
    with open_outbox(root / workspace.OUTBOX, trained.mlflow_run_id) as outbox:
        outbox.note_metrics(held_out)
        outbox.deliver_for(config.tracking_uri, FLUSH_SECONDS)
    return metrics


def _read_training_loss() -> float:
    lines = (workspace.TRAINED / STEPS_FILE).read_text().splitlines()
    return fmean(json.loads(line)["loss"] for line in lines[-max(3, len(lines) // 10) :])


def _score_by_workers(config: Config, root: Path, run_id: str, num_workers: int) -> list[Sums]:
    """The model's sums on each readable held-out shard."""
    from training.scoring import score_by_workers

    spec = evaluation_spec(config, root, run_id, num_workers)
    shutil.rmtree(spec.run_directory, ignore_errors=True)
    with workspace.explain_disk(spec.run_directory):
        spec.run_directory.mkdir(parents=True)
    _, shards = spec.read_readable("holdout")
    with hold_nodes(spec.nodes, config.schedule.wait_seconds, "evaluate"):
        return score_by_workers(
            spec, lambda done: report("evaluate", done, len(shards), "shards by workers")
        )


@recorded
def register(config: Config) -> ModelVersion:
    """Register the model with its lineage; it becomes the champion only if it is better."""
    from training.registry import register_model
    from training.tracking import await_tracking

    root = Path.cwd()
    manifest = read_current_manifest(config)
    trained, readable = _read_current_training(config, manifest)
    metrics = workspace.read_result(workspace.EVALUATED / "evaluation.json", Metrics, "evaluate")
    if metrics.fingerprint != trained.fingerprint:
        raise WorkspaceError(
            f"{workspace.EVALUATED} is of another training than {workspace.TRAINED}: "
            "run `convoy stage evaluate`"
        )
    excluded = (*trained.excluded, *metrics.excluded)
    await_tracking(config.tracking_uri, AWAY_SECONDS)
    deliver_left(root / workspace.OUTBOX, config.tracking_uri)
    name = config.registration.model_name
    log_made(config, "model", name, readable, open_log(config))
    model_version = register_model(
        open_workload(config, root),
        config.workload.code,
        workspace.TRAINED / WEIGHTS_FILE,
        config.train.model,
        metrics,
        name=name,
        tracking_uri=config.tracking_uri,
        run_id=trained.mlflow_run_id,
        tags=lineage_tags(config, root, manifest, excluded)
        | {"convoy.run": trained.fingerprint, "mlflow.run_id": trained.mlflow_run_id},
    )
    open_log(config).append(
        AccessEntry(
            region=config.site.name,
            action="register",
            object=model_version.uri,
            artifact="model",
            decision="allowed",
            reason=model_version.reason,
            run_id=trained.mlflow_run_id,
        )
    )
    with workspace.replace_directory(workspace.REGISTERED) as fresh:
        workspace.write_result(fresh / "model_version.json", model_version)
    return model_version


def _read_current_training(
    config: Config, manifest: Manifest
) -> tuple[TrainReport, tuple[Shard, ...]]:
    """The last training and the shards that it read.

    Raises WorkspaceError unless it was of the present data, code and parameters: a record that it
    trained on could be held out now.
    """
    trained = read_train_report()
    readable, _ = log_refusals(config, lambda: check_site(config, manifest))
    if digest_training(config, manifest, readable) != trained.fingerprint:
        raise WorkspaceError(
            f"{workspace.TRAINED} is of other data, code, rules or parameters than the present "
            "ones: run `convoy stage train` to train on these"
        )
    return trained, readable


def read_train_report() -> TrainReport:
    """What the last training left."""
    return workspace.read_result(workspace.TRAINED / "report.json", TrainReport, "train")


Stage = Callable[[Config], BaseModel]

STAGES: dict[str, Stage] = {
    "ingest": ingest,
    "shard": shard,
    "upload": upload,
    "train": train,
    "evaluate": evaluate,
    "register": register,
}
