"""The handbook workload, on a book of two pages in the form that Debian installs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import debian_handbook

PAGE = """<?xml version="1.0" encoding="UTF-8" standalone="no"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Strict//EN" "http://www.w3.org/TR/xhtml1.dtd"><html>
<head><title>{title}</title></head><body><p id="title">Site</p><ul class="docnav"><li>{title}</li>
</ul><div class="section"><h2>{title}</h2>{paragraphs}</div></body></html>"""
ENGLISH = ("Install <code>apt</code> first.", "Then\n\t\t\trest &amp; wait.")
FRENCH = ("Installez d'abord <code>apt</code>.", "Then\n\t\t\trest &amp; wait.")


def write_page(folder: Path, name: str, *paragraphs: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f'<div class="para">\n\t{x}\n</div><pre># screen</pre>' for x in paragraphs)
    (folder / f"{name}.html").write_text(PAGE.format(title=name, paragraphs=text), "utf-8")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "html"
    write_page(path / "en-US", "apt", *ENGLISH)
    write_page(path / "en-US", "zones", "x" * 300, ENGLISH[0])
    write_page(path / "fr-FR", "apt", *FRENCH)
    write_page(path / "zh-TW", "apt", "先安裝 <em>apt</em>。")
    return path


@pytest.fixture
def raw(book: Path, tmp_path: Path) -> Path:
    destination = tmp_path / "raw"
    destination.mkdir()
    debian_handbook.ingest(destination, source=str(book))
    return destination


def test_ingest_keeps_paragraphs_once_and_leaves_out_what_is_not_translated(raw: Path) -> None:
    written = {str(path.relative_to(raw)): path.read_text() for path in raw.rglob("*.txt")}
    assert written == {
        "US/en-US.txt": f"Install apt first.\nThen rest & wait.\n{'x' * 300}\n",
        "EU/fr-FR.txt": "Installez d'abord apt.\n",
        "TW/zh-TW.txt": "先安裝 apt。\n",
    }


def test_a_paragraph_around_a_list_loses_the_list_alone(book: Path, tmp_path: Path) -> None:
    inside = 'before <ul><li><div class="para">inside</div></li></ul> after'
    write_page(book / "fr-FR", "lists", inside)
    debian_handbook.ingest(tmp_path, source=str(book), languages=["fr-FR"])
    assert (tmp_path / "EU/fr-FR.txt").read_text() == (
        "Installez d'abord apt.\nbefore\ninside\nafter\n"
    )


def test_a_book_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="apt install debian-handbook"):
        debian_handbook.ingest(tmp_path, source=str(tmp_path / "none"))


def test_a_language_that_is_not_there(book: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no xx-XX, .* it has en-US, fr-FR, zh-TW"):
        debian_handbook.ingest(tmp_path, source=str(book), languages=["fr-FR", "xx-XX"])


def test_records_are_every_byte_once(raw: Path) -> None:
    found = list(debian_handbook.records(raw))
    for path in raw.rglob("*.txt"):
        own = [r.fields["bytes"] for r in found if r.fields["language"] == path.stem]
        assert b"".join(own) == path.read_bytes()
        assert {len(block) for block in own[:-1]} <= {128}
    assert {(r.fields["language"], r.jurisdiction) for r in found} == {
        ("en-US", "US"),
        ("fr-FR", "EU"),
        ("zh-TW", "TW"),
    }


BLOCKS: list[dict[str, Any]] = [{"bytes": b"a" * 128}, {"bytes": "é\n".encode()}]


def test_collate_predicts_each_byte_from_those_before_it() -> None:
    inputs, targets = debian_handbook.collate(BLOCKS)
    assert inputs.shape == targets.shape == (2, 128)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[1, :4].tolist() == [0, 0xC3, 0xA9, 0]
    assert targets[1, :4].tolist() == [0xC3, 0xA9, 10, -100]
    assert inputs[0].tolist() == [0, *b"a" * 127]
    assert set(targets[1, 3:].tolist()) == {-100}


def _logits(targets: Tensor) -> Tensor:
    return torch.randn(*targets.shape, 256, generator=torch.Generator().manual_seed(0))


def test_loss_of_a_batch_is_the_mean_of_its_halves_and_metrics_agree() -> None:
    _, targets = debian_handbook.collate(BLOCKS)
    logits = _logits(targets)
    whole = debian_handbook.loss(logits, targets)
    halves = [debian_handbook.loss(logits[i : i + 1], targets[i : i + 1]) for i in (0, 1)]
    assert float(whole) == pytest.approx(float(sum(halves)) / 2, rel=1e-6)
    bits, num_bytes = debian_handbook.metrics(logits, targets)["bits_per_byte"]
    assert num_bytes == 128 + 3
    assert bits == pytest.approx(float(whole) * 2 * 128 / math.log(2), rel=1e-6)


def test_baselines_spend_a_whole_probability() -> None:
    blocks = [{"bytes": b"abab"}] * 9  # of which every eighth is counted
    scorers = debian_handbook.baselines(iter(blocks))
    for scorer in scorers.values():
        chances = [
            2 ** -scorer([{"bytes": bytes([byte])}])["bits_per_byte"][0] for byte in range(256)
        ]
        assert sum(chances) == pytest.approx(1)
    # "a" at first, without a context: twice of eight bytes seen, two different ones.
    bits, num_bytes = scorers["trigram"]([{"bytes": b"a"}])["bits_per_byte"]
    assert num_bytes == 1
    assert bits == pytest.approx(-math.log2((4 + 2 / 256) / (8 + 2)))


class Writes(nn.Module):
    """Stands for a model: always the same byte."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        logits[..., ord("z")] = 1.0
        return logits


def test_predict_fills_the_block() -> None:
    (text,) = debian_handbook.predict(Writes(), [{"prefix": "é"}])
    assert text == "é" + "z" * 126
    model = debian_handbook.model(width=16, num_heads=2, num_layers=1).eval()
    assert len(debian_handbook.predict(model, debian_handbook.example)) == 2


@pytest.mark.skipif(
    not Path(debian_handbook.INSTALLED).is_dir(), reason="debian-handbook is not installed"
)
def test_the_book_as_debian_installs_it(tmp_path: Path) -> None:
    debian_handbook.ingest(tmp_path, languages=["en-US", "fr-FR"])
    sizes = {path.stem: path.stat().st_size for path in tmp_path.rglob("*.txt")}
    assert sizes["en-US"] > 500_000
    assert sizes["fr-FR"] > 300_000
    assert b"<" not in (tmp_path / "EU/fr-FR.txt").read_bytes()[:1000]
