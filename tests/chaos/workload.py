"""The toy of the chaos runs: its model counts how often it was given each sample.

The counts are a buffer, summed over the workers in each step. So they go back with the parameters
when a world is restored, and the weights file says what all committed steps have seen. Each sample
also has parameters of its own, which end up different where a step missed it or was given it twice.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.record import Record

if TYPE_CHECKING:
    from torch import Tensor, nn


def ingest(destination: Path, count: int = 900) -> None:
    with (destination / "sums.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        for i in range(count):
            writer.writerow([i, i * 7 % 101 / 101, i * 5 % 97 / 97, ("EU", "US", "CN")[i % 3]])


def records(source: Path) -> Iterator[Record]:
    with (source / "sums.csv").open(newline="") as file:
        for number, a, b, jurisdiction in csv.reader(file):
            yield Record({"number": int(number), "a": float(a), "b": float(b)}, jurisdiction)


def model(hidden: int = 16, count: int = 900, dropout: float = 0.1) -> "nn.Module":
    import torch
    from torch import distributed, nn

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, 2)
            )
            self.own = nn.Embedding(count, 2)
            nn.init.zeros_(self.own.weight)
            self.seen: Tensor
            self.register_buffer("seen", torch.zeros(count, dtype=torch.int64))

        def forward(self, inputs: "Tensor") -> "Tensor":
            numbers = inputs[:, 0].long()
            if self.training:
                given = torch.bincount(numbers, minlength=count)
                if distributed.is_initialized():
                    distributed.all_reduce(given)
                self.seen += given
            result: Tensor = self.layers(inputs[:, 1:]) + self.own(numbers)
            return result

    return Counting()


def collate(records: Sequence[Mapping[str, Any]]) -> "tuple[Tensor, Tensor]":
    import torch

    inputs = torch.tensor([[r["number"], r["a"], r["b"]] for r in records], dtype=torch.float32)
    return inputs, torch.tensor([int(r["a"] + r["b"] > 1) for r in records])


def loss(output: "Tensor", target: "Tensor") -> "Tensor":
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, target)


def metrics(output: "Tensor", target: "Tensor") -> dict[str, tuple[float, float]]:
    hits = (output.argmax(1) == target).sum().item()
    return {"accuracy": (float(hits), float(len(target)))}
