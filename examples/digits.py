"""Read handwritten digits: 8 by 8 grey images, and the digit each one shows.

The data are the "Optical Recognition of Handwritten Digits" test set by E. Alpaydin and C. Kaynak
(UCI Machine Learning Repository, CC BY 4.0), as it ships inside scikit-learn.

The images say nothing of where they were written: this dataset has no borders of its own. To be
sharded like one that has, image number i is given to EU, US or CN in turn (i modulo 3).
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from data.record import Record

if TYPE_CHECKING:  # torch loads where it is needed, so that sharding does not pay for it
    from torch import Tensor, nn

Scorer = Callable[[Iterable[Mapping[str, Any]]], dict[str, tuple[float, float]]]

_JURISDICTIONS = ("EU", "US", "CN")
_NUM_PIXELS = 64
_NUM_DIGITS = 10
_BLACK = 16  # a pixel counts the dark dots in a square of four by four
_PIXEL_FIELDS = tuple(f"pixel{index}" for index in range(_NUM_PIXELS))

# fmt: off
_ZERO = [
    0,  0,  5, 13,  9,  1,  0,  0,
    0,  0, 13, 15, 10, 15,  5,  0,
    0,  3, 15,  2,  0, 11,  8,  0,
    0,  4, 12,  0,  0,  8,  8,  0,
    0,  5,  8,  0,  0,  9,  8,  0,
    0,  4, 11,  0,  1, 12,  7,  0,
    0,  2, 14,  5, 10, 12,  0,  0,
    0,  0,  6, 13, 10,  0,  0,  0,
]
# fmt: on
example: list[dict[str, Any]] = [{"pixels": _ZERO}]


def ingest(destination: Path) -> None:
    """Write `digits.csv`: a jurisdiction, a digit and 64 pixels a line, in scikit-learn's order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    with (destination / "digits.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["jurisdiction", "digit", *_PIXEL_FIELDS])
        for index, (pixels, digit) in enumerate(zip(digits.data, digits.target, strict=True)):
            jurisdiction = _JURISDICTIONS[index % len(_JURISDICTIONS)]
            writer.writerow([jurisdiction, int(digit), *map(int, pixels)])


def records(source: Path) -> Iterator[Record]:
    """The images of every `*.csv` file in a directory, files by name, lines as they stand.

    ValueError, naming file and line, for a line without a jurisdiction, a digit or 64 pixels.
    """
    for path in sorted(source.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                try:
                    yield _record(row)
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{path}:{reader.line_num}: {error}") from None


def _record(row: Mapping[str, str]) -> Record:
    if not row.get("jurisdiction"):
        raise ValueError("field 'jurisdiction' is missing; each image needs one")
    pixels = [int(row[field]) for field in _PIXEL_FIELDS]
    return Record({"pixels": pixels, "digit": int(row["digit"])}, row["jurisdiction"])


def model(*, width: int = 128) -> "nn.Module":
    """64 pixels in, two hidden layers of `width`, a logit for each digit out."""
    from torch import nn

    return nn.Sequential(
        nn.Linear(_NUM_PIXELS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, _NUM_DIGITS),
    )


def collate(records: Sequence[Mapping[str, Any]]) -> "tuple[Tensor, Tensor]":
    """Pixels from 0 to 1, (batch, 64), and digits, (batch,)."""
    import torch

    digits = np.asarray([fields["digit"] for fields in records], np.int64)
    return torch.from_numpy(_pixels(records)), torch.from_numpy(digits)


def _pixels(rows: Iterable[Mapping[str, Any]]) -> NDArray[np.float32]:
    return np.asarray([fields["pixels"] for fields in rows], np.float32) / np.float32(_BLACK)


def loss(output: "Tensor", target: "Tensor") -> "Tensor":
    """Cross-entropy in nats, mean over the images."""
    import torch.nn.functional as F

    return F.cross_entropy(output, target)


def metrics(output: "Tensor", target: "Tensor") -> dict[str, tuple[float, float]]:
    """Accuracy, the share of images read rightly, and loss in nats an image."""
    count = float(len(target))
    correct = float((output.argmax(dim=-1) == target).sum())
    return {"accuracy": (correct, count), "loss": (loss(output, target).item() * count, count)}


def baselines(train: Iterable[Mapping[str, Any]]) -> dict[str, Scorer]:
    """The commonest digit, and the digit whose mean image is nearest. Accuracy alone."""
    rows = list(train)
    digits = np.asarray([fields["digit"] for fields in rows])
    pixels = _pixels(rows)
    commonest = int(np.bincount(digits).argmax())
    known = np.unique(digits)
    means = np.stack([pixels[digits == digit].mean(axis=0) for digit in known])

    def majority(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
        return _accuracy(rows, lambda pixels: np.full(len(pixels), commonest))

    def nearest_mean(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
        def read(pixels: NDArray[np.float32]) -> NDArray[np.int64]:
            distances = ((pixels[:, None] - means) ** 2).sum(axis=-1)
            nearest: NDArray[np.int64] = known[distances.argmin(axis=1)]
            return nearest

        return _accuracy(rows, read)

    return {"majority": majority, "nearest_mean": nearest_mean}


def _accuracy(
    rows: Iterable[Mapping[str, Any]],
    read: Callable[[NDArray[np.float32]], NDArray[np.int64]],
) -> dict[str, tuple[float, float]]:
    rows = list(rows)
    digits = np.asarray([fields["digit"] for fields in rows])
    return {"accuracy": (float((read(_pixels(rows)) == digits).sum()), float(len(rows)))}


def predict(model: "nn.Module", rows: list[dict[str, Any]]) -> list[int]:
    """The digit that each row's 64 `pixels` (0 white to 16 black) show."""
    import torch

    with torch.inference_mode():
        digits = model(torch.from_numpy(_pixels(rows))).argmax(dim=-1)
    return [int(digit) for digit in digits]
