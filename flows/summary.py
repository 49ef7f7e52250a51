"""Stage results in plain words: above all, what was not used, of whom and why."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from data.manifest import Manifest
from data.residency import Exclusion
from data.upload import UploadReceipt
from pipeline.remotes import Movement
from pipeline.stages import Placement, RawInput, TrainReport
from training.evaluate import Metrics
from training.registry import ModelVersion

_MAX_NAMED = 6


def summarize(result: BaseModel) -> str:
    """A few lines for a person."""
    match result:
        case RawInput():
            return f"ingest: {result.num_files} files, {result.num_bytes:,} bytes in {result.path}"
        case Manifest():
            counts = result.count_records()
            return (
                f"shard: {sum(counts.values()):,} records of {len(counts)} jurisdictions in "
                f"{len(result.shards)} shards, version {result.digest[:12]}"
            )
        case Placement():
            return "\n".join(_summarize_placement(result))
        case TrainReport():
            return _summarize_training(result)
        case Metrics():
            return _summarize_metrics(result)
        case ModelVersion():
            return _summarize_registration(result)
        case _:
            raise AssertionError(type(result))


def describe_exclusions(exclusions: Iterable[Exclusion]) -> list[str]:
    """One line for each jurisdiction whose records were not used."""
    return [
        f"  not used: {e.num_records:,} record{'' if e.num_records == 1 else 's'} of "
        f"{e.jurisdiction}: {e.reason}"
        for e in exclusions
    ]


def _describe_unscored(exclusions: Sequence[Exclusion]) -> list[str]:
    """One line: the training's lines have the reasons already."""
    if len(exclusions) < 2:
        return describe_exclusions(exclusions)
    num_records = sum(e.num_records for e in exclusions)
    named = ", ".join(e.jurisdiction for e in exclusions[:_MAX_NAMED])
    more = f" and {len(exclusions) - _MAX_NAMED} more" if len(exclusions) > _MAX_NAMED else ""
    return [f"  not scored: {num_records:,} records of {named}{more}, for the same reasons"]


def _summarize_placement(placement: Placement) -> list[str]:
    lines = [line for receipt in placement.receipts for line in _summarize_receipt(receipt)]
    empty = [receipt.region for receipt in placement.receipts if not receipt.placed]
    return lines + ([f"upload: nothing is for {', '.join(empty)}"] if empty else [])


def _summarize_registration(model: ModelVersion) -> str:
    crown = "is the champion" if model.champion else "is not the champion"
    line = f"register: {model.name} version {model.version} {crown}: {model.reason}"
    if model.answers == "raw output":
        line += (
            "\n  the workload has no predict(): the registered model answers its raw output, to "
            "rows with all fields that collate() reads"
        )
    return line


def _summarize_receipt(receipt: UploadReceipt) -> list[str]:
    if not receipt.placed:
        return []
    lines = [
        f"upload: {receipt.region} holds {len(receipt.placed)} sealed shards; the policy keeps "
        f"{sum(e.num_shards for e in receipt.withheld)} away from it"
    ]
    unknown = [f"{c.subject} ({c.found})" for c in receipt.checks if c.verdict == "not checked"]
    if unknown:
        lines.append(f"  not checked of {receipt.region}: {', '.join(unknown)}")
    return lines


def describe_movement(direction: str, done: Movement) -> list[str]:
    """One line for each part of the raw input and region."""
    return [
        f"{m.path} ({', '.join(m.jurisdictions)}) {direction} {m.region}: {m.num_sent} of "
        f"{m.num_files} files, the others were there"
        for m in done.moved
    ] + [
        f"{k.path} ({', '.join(k.jurisdictions)}) may not be in {k.region}: {k.reason}"
        for k in done.kept
    ]


def _summarize_training(report: TrainReport) -> str:
    lines = [
        f"train: {report.steps} steps on {report.world_size} workers, final loss "
        f"{report.final_loss:.4f}, {report.samples_per_second:,.0f} samples/s, "
        f"{sum(report.num_records.values()):,} records read {report.epochs:.2f} times"
        + (", resumed from a checkpoint" if report.resumed else "")
    ]
    lines += [
        f"  survived: {i.message} ({i.steps_lost} steps done again, {i.seconds_lost:.1f} s lost)"
        for i in report.incidents
    ]
    if report.goodput and report.incidents:
        lines.append(f"  goodput: {100 * report.goodput.ratio:.0f} % of the time moved it on")
    lines += [f"  noted: {notice.message}" for notice in report.notices]
    return "\n".join(lines + describe_exclusions(report.excluded))


def _summarize_metrics(metrics: Metrics) -> str:
    baselines = {
        name: values[metrics.primary]
        for name, values in metrics.overall.baselines.items()
        if metrics.primary in values
    }
    others = ", ".join(f"{name} {value:.4f}" for name, value in baselines.items())
    sign = 1 if metrics.goal == "minimize" else -1
    better = [n for n, value in baselines.items() if sign * (value - metrics.primary_value) < 0]
    lines = [
        f"evaluate: {metrics.primary} {metrics.primary_value:.4f} on "
        f"{sum(metrics.num_records.values()):,} held-out records"
        + (f"; baselines: {others}" if others else "")
        + (f". WORSE than {', '.join(better)}: it has not learnt enough" if better else "")
    ]
    if metrics.training_loss is not None and "loss" in metrics.overall.model:
        lines.append(
            f"  loss: {metrics.training_loss:.4f} in the last steps of training, "
            f"{metrics.overall.model['loss']:.4f} on held-out records"
        )
    return "\n".join(lines + _describe_unscored(metrics.excluded))
