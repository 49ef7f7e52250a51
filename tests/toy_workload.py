"""A workload of seconds for tests: two numbers, is their sum above one? With dropout."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.record import Record

if TYPE_CHECKING:
    from torch import Tensor, nn

example = [{"a": 0.9, "b": 0.8}, {"a": 0.1, "b": 0.2}]


def ingest(destination: Path, count: int = 900) -> None:
    with (destination / "sums.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        for i in range(count):
            writer.writerow([i, i * 7 % 101 / 101, i * 5 % 97 / 97, ("EU", "US", "CN")[i % 3]])


def records(source: Path) -> Iterator[Record]:
    with (source / "sums.csv").open(newline="") as file:
        for number, a, b, jurisdiction in csv.reader(file):
            yield Record({"number": int(number), "a": float(a), "b": float(b)}, jurisdiction)


def model(hidden: int = 16) -> "nn.Module":
    from torch import nn

    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(0.1), nn.Linear(hidden, 2))


def collate(records: Sequence[Mapping[str, Any]]) -> "tuple[Tensor, Tensor]":
    import torch

    inputs = torch.tensor([[r["a"], r["b"]] for r in records], dtype=torch.float32)
    return inputs, torch.tensor([int(r["a"] + r["b"] > 1) for r in records])


def loss(output: "Tensor", target: "Tensor") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, target)


def metrics(output: "Tensor", target: "Tensor") -> dict[str, tuple[float, float]]:
    hits = (output.argmax(1) == target).sum().item()
    return {"accuracy": (float(hits), float(len(target)))}


def baselines(
    train: Iterable[Mapping[str, Any]],
) -> dict[str, Callable[[Iterable[Mapping[str, Any]]], dict[str, tuple[float, float]]]]:
    labels = [r["a"] + r["b"] > 1 for r in train]
    majority = sum(labels) * 2 > len(labels)

    def score(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
        hits = [(r["a"] + r["b"] > 1) == majority for r in rows]
        return {"accuracy": (float(sum(hits)), float(len(hits)))}

    return {"majority": score}


def predict(model: "nn.Module", rows: list[dict[str, Any]]) -> list[bool]:
    return [bool(answer) for answer in model(collate(rows)[0]).argmax(1).tolist()]
