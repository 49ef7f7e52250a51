"""The champion's gate: the alias moves only to a model that beats the one that bears it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from training.evaluate import Metrics
from training.tracking import CHAMPION, METRIC_TAG, find_champion

PREVIOUS_TAG = "convoy.previous_champion"
REASON_TAG = "convoy.champion_reason"
"""The gate as it was when a version was made."""
_HELD_OUT_TAGS = ("convoy.manifest", "convoy.excluded")
"""Lineage that decides which records a model is measured on."""


@dataclass(frozen=True)
class Verdict:
    """Whether a model becomes the champion, and why."""

    wins: bool
    reason: str
    previous: str | None
    """The champion's version before."""


def judge(client: Any, name: str, metrics: Metrics, tags: Mapping[str, str]) -> Verdict:
    """A model wins if there is no champion or its primary metric beats the champion's."""
    champion = find_champion(client, name)
    value = metrics.primary_value
    if champion is None:
        return Verdict(True, "there was no champion", None)
    previous = str(champion.version)
    tag = champion.tags.get(f"{METRIC_TAG}{metrics.primary}")
    if tag is None:
        return Verdict(
            False, f"champion version {previous} has no metric {metrics.primary}", previous
        )
    wins = value < float(tag) if metrics.goal == "minimize" else value > float(tag)
    reason = (
        f"{metrics.primary} {value:.4f} {'beats' if wins else 'does not beat'} "
        f"{float(tag):.4f} of version {previous}"
    )
    if metrics.primary == "accuracy":
        reason += _count_apart(value - float(tag), metrics)
    if any(champion.tags.get(key) != tags.get(key) for key in _HELD_OUT_TAGS):
        reason += _advise_comparison(champion, wins)
    return Verdict(wins, reason, previous)


def _count_apart(difference: float, metrics: Metrics) -> str:
    """Accuracies differ by few records where few are held out."""
    count = sum(metrics.num_records.values())
    return f", a difference of {round(abs(difference) * count)} of {count} held-out records"


def _advise_comparison(champion: Any, wins: bool) -> str:
    """What makes two models comparable that were measured on other data or fields."""
    number = champion.version
    revision = champion.tags.get("git.revision", "")[:12]
    back = f"check out {revision}, its revision" if revision else "check out its revision"
    reset = (
        f"If version {number} should be the champion again, move the alias '{CHAMPION}' in MLflow"
        if wins
        else f"If version {number} should no longer count, set register.model_name anew, or move "
        f"the alias '{CHAMPION}' in MLflow"
    )
    return (
        f". The two were measured on different versions of the dataset, perhaps on different "
        f"held-out records: for a comparison on the same ones {back}, in a copy of this folder, "
        f"give it the present input and run it. {reset}"
    )


def seat(
    client: Any, name: str, created: Any, metrics: Metrics, tags: Mapping[str, str]
) -> Verdict:
    """Move the alias to a version if it wins now. Where it is the champion already, after a call
    that was killed, its tags have the verdict."""
    champion = find_champion(client, name)
    if champion is not None and champion.version == created.version:
        return Verdict(True, created.tags[REASON_TAG], created.tags[PREVIOUS_TAG] or None)
    verdict = judge(client, name, metrics, tags)
    if verdict.wins:
        client.set_registered_model_alias(name, CHAMPION, str(created.version))
    return verdict
