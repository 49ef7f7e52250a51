"""The digits workload: the second shape that a workload may have."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from data.record import Record
from examples import digits


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("raw")
    digits.ingest(directory)
    return directory


@pytest.fixture(scope="module")
def images(raw: Path) -> list[Record]:
    return list(digits.records(raw))


def test_ingest_writes_the_same_bytes_again(raw: Path, tmp_path: Path) -> None:
    digits.ingest(tmp_path)
    assert (tmp_path / "digits.csv").read_bytes() == (raw / "digits.csv").read_bytes()


def test_jurisdictions_take_turns(images: list[Record]) -> None:
    assert len(images) == 1797
    assert [image.jurisdiction for image in images[:4]] == ["EU", "US", "CN", "EU"]
    assert set(Counter(image.jurisdiction for image in images).values()) == {599}


def test_the_example_is_the_first_image(images: list[Record]) -> None:
    assert images[0].fields == {"pixels": digits.example[0]["pixels"], "digit": 0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (",1," + ",".join(["0"] * 64), "'jurisdiction' is missing"),
        ("EU,1," + ",".join(["0"] * 63), "int"),
        ("EU,one," + ",".join(["0"] * 64), "invalid literal"),
    ],
)
def test_a_line_that_is_no_image_is_named(tmp_path: Path, line: str, message: str) -> None:
    header = ",".join(["jurisdiction", "digit", *(f"pixel{index}" for index in range(64))])
    (tmp_path / "mine.csv").write_text(f"{header}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        list(digits.records(tmp_path))
    assert f"{tmp_path / 'mine.csv'}:2: " in str(caught.value)


def test_collate(images: list[Record]) -> None:
    pixels, targets = digits.collate([image.fields for image in images[:5]])
    assert pixels.shape == (5, 64)
    assert pixels.dtype == torch.float32
    assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)
    assert targets.tolist() == [0, 1, 2, 3, 4]


def test_metrics_agree_with_loss() -> None:
    output = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    target = torch.tensor([0, 1, 2])
    scores = digits.metrics(output, target)
    assert scores["accuracy"] == (2.0, 3.0)
    total, weight = scores["loss"]
    assert total / weight == pytest.approx(float(digits.loss(output, target)))


def test_baselines_by_hand() -> None:
    def image(dark: int, digit: int) -> dict[str, object]:
        return {"pixels": [16 if index < dark else 0 for index in range(64)], "digit": digit}

    scorers = digits.baselines(iter([image(0, 3), image(2, 3), image(60, 7)]))
    held_out = [image(5, 3), image(62, 7), image(10, 7)]
    assert scorers["majority"](held_out) == {"accuracy": (1.0, 3.0)}
    assert scorers["nearest_mean"](iter(held_out)) == {"accuracy": (2.0, 3.0)}


def test_it_learns_to_read(images: list[Record]) -> None:
    torch.manual_seed(0)
    model = digits.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    rows = [image.fields for image in images]
    for start in list(range(0, 1600, 32)) * 2:
        pixels, targets = digits.collate(rows[start : start + 32])
        optimizer.zero_grad()
        digits.loss(model(pixels), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    held_out = rows[1600:]
    read = digits.predict(model.eval(), [{"pixels": row["pixels"]} for row in held_out])
    assert all(type(digit) is int for digit in read)
    correct = sum(digit == row["digit"] for digit, row in zip(read, held_out, strict=True))
    assert correct / len(held_out) > 0.8
    assert digits.predict(model, digits.example) == [0]
