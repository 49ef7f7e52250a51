"""Read a book: a small GPT over the UTF-8 bytes of "The Debian Administrator's Handbook".

The data are Debian's package debian-handbook (https://debian-handbook.info), the book and its
translations, by Raphaël Hertzog, Roland Mas, Freexian SARL and the translators, under GPL-2.0+ or
CC BY-SA 3.0 (https://creativecommons.org/licenses/by-sa/3.0/). Changed here: the text of the
paragraphs alone is kept, and a paragraph that a translation has not translated, being word for word
in the English book, is left out of it.

The language decides the jurisdiction: the country that its name ends with, as in `fr-FR`, by the
rule of the place names. So French and German are "EU", `en-US` is "US", `zh-CN` is "CN" and `zh-TW`
is "TW". This is an example of a rule: it says nothing of where the translators live.

A sample is a block of BLOCK_BYTES consecutive bytes of one language, and the model predicts each of
them from those before it, across the limits of paragraphs.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.record import Record
from examples.ngram import NGram
from examples.place_names import jurisdiction_of

if TYPE_CHECKING:  # torch loads where it is needed, so that sharding does not pay for it
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from examples.gpt import GPT

Scorer = Callable[[Iterable[Mapping[str, Any]]], dict[str, tuple[float, float]]]

INSTALLED = "/usr/share/doc/debian-handbook/html"
BLOCK_BYTES = 128
_ORIGINAL = "en-US"
_START = 0  # what the model reads before the first byte of a block; no byte of a text
_IGNORED = -100  # targets that are not predicted
_BASELINE_SHARE = 8  # one block in so many: the n-grams of all of them would not fit the memory

example: list[dict[str, Any]] = [{"prefix": "Debian "}, {"prefix": "Le système "}]


def ingest(
    destination: Path, *, source: str = INSTALLED, languages: Sequence[str] | None = None
) -> None:
    """Write the paragraphs as `JURISDICTION/LANGUAGE.txt`, a line each, in the order of the files.

    source: the book in HTML, a folder for each language, as Debian installs it.
    languages: folders to take; null takes all. FileNotFoundError, with the remedy, where the book
    or a language is not there.
    """
    book = Path(source)
    if not (book / _ORIGINAL).is_dir():
        raise FileNotFoundError(
            f"the book is not in {book}: run `apt install debian-handbook`, or name its folder in "
            "params.yaml: ingest.params.source"
        )
    found = sorted(path.name for path in book.iterdir() if path.is_dir())
    if unknown := sorted(set(languages or ()) - set(found)):
        raise FileNotFoundError(
            f"{book} has no {', '.join(unknown)}, which params.yaml: ingest.params.languages "
            f"names; it has {', '.join(found)}"
        )
    original = dict.fromkeys(_paragraphs(book / _ORIGINAL))
    for language in languages or found:
        own = dict.fromkeys(_paragraphs(book / language))
        if language != _ORIGINAL:
            own = {paragraph: None for paragraph in own if paragraph not in original}
        path = destination / jurisdiction_of(language.rpartition("-")[2]) / f"{language}.txt"
        path.parent.mkdir(exist_ok=True)
        lines = "".join(f"{paragraph}\n" for paragraph in own)
        path.write_text(lines, encoding="utf-8", newline="\n")


def _paragraphs(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.html")):
        reader = _Paragraphs()
        reader.feed(path.read_text(encoding="utf-8"))
        reader.close()
        yield from reader.found


class _Paragraphs(HTMLParser):
    """The text of each `<div class="para">`, without the lists and screens inside it."""

    _BLOCKS = frozenset(("div", "dl", "ol", "p", "pre", "table", "ul"))

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[bool] = []
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self._BLOCKS:
            self._end_paragraph()
            self._open.append(tag == "div" and ("class", "para") in attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._BLOCKS and self._open:
            self._end_paragraph()
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1]:
            self._text.append(data)

    def _end_paragraph(self) -> None:
        if text := " ".join("".join(self._text).split()):
            self.found.append(text)
        self._text.clear()


def records(source: Path) -> Iterator[Record]:
    """The blocks of every `JURISDICTION/LANGUAGE.txt`; the last of a file may be shorter."""
    for path in sorted(source.glob("*/*.txt")):
        text = path.read_bytes()
        for start in range(0, len(text), BLOCK_BYTES):
            fields = {"language": path.stem, "bytes": text[start : start + BLOCK_BYTES]}
            yield Record(fields=fields, jurisdiction=path.parent.name)


def model(*, width: int = 64, num_heads: int = 4, num_layers: int = 3) -> "nn.Module":
    """A GPT over bytes, which reads a block."""
    from examples.gpt import GPT

    return GPT(256, BLOCK_BYTES, width, num_heads, num_layers)


def tp_plan(model: "GPT", degree: int, **options: bool) -> "dict[str, ParallelStyle]":
    """See the GPT's; sequence_parallel and loss_parallel are its options."""
    from examples import gpt

    return gpt.tp_plan(model, degree, **options)


def pp_split(model: "GPT", num_stages: int) -> "list[nn.Module]":
    """See the GPT's."""
    from examples import gpt

    return gpt.pp_split(model, num_stages)


def collate(records: Sequence[Mapping[str, Any]]) -> "tuple[Tensor, Tensor]":
    """For each byte those before it, and that byte: two of (batch, BLOCK_BYTES), int64.

    What is missing of a short block is a target of -100: not predicted.
    """
    import torch

    inputs = np.zeros((len(records), BLOCK_BYTES), np.int64)
    targets = np.full((len(records), BLOCK_BYTES), _IGNORED, np.int64)
    inputs[:, 0] = _START
    for row, fields in enumerate(records):
        block = np.frombuffer(fields["bytes"], np.uint8)
        inputs[row, 1 : len(block)] = block[:-1]
        targets[row, : len(block)] = block
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def loss(output: "Tensor", target: "Tensor") -> "Tensor":
    """Nats a byte of a whole block, mean over the blocks.

    A short block counts as a whole one: so the mean of equal parts' losses is the loss of the whole
    batch, whichever worker the short ones fell to.
    """
    return _nats(output, target) / target.numel()


def metrics(output: "Tensor", target: "Tensor") -> dict[str, tuple[float, float]]:
    """Bits for each byte: total bits, and the number of bytes."""
    num_bytes = int((target != _IGNORED).sum())
    return {"bits_per_byte": (_nats(output, target).item() / math.log(2), num_bytes)}


def _nats(output: "Tensor", target: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    logits, expected = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(logits, expected, ignore_index=_IGNORED, reduction="sum")


def baselines(train: Iterable[Mapping[str, Any]]) -> dict[str, Scorer]:
    """Byte n-grams, of a part of the blocks: without context, and with the two bytes before."""
    blocks = [fields["bytes"] for fields in islice(train, 0, None, _BASELINE_SHARE)]
    return {
        "unigram": _scorer(NGram(blocks, _unigram_contexts, 0)),
        "trigram": _scorer(NGram(blocks, _trigram_contexts, 0)),
    }


def _scorer(ngram: NGram) -> Scorer:
    return lambda rows: {"bits_per_byte": ngram.bits(fields["bytes"] for fields in rows)}


def _unigram_contexts(block: bytes, position: int) -> tuple[bytes, ...]:
    return (b"",)


def _trigram_contexts(block: bytes, position: int) -> tuple[bytes, ...]:
    lengths = range(min(position, 2) + 1)
    return tuple(block[position - length : position] for length in lengths)


def predict(model: "nn.Module", rows: list[dict[str, Any]]) -> list[str]:
    """Go on with each row's `prefix` to the end of the block, byte by likeliest byte."""
    import torch

    texts = []
    for row in rows:
        block = bytearray(str(row["prefix"]).encode()[: BLOCK_BYTES - 1])
        while len(block) < BLOCK_BYTES:
            block.append(int(model(torch.tensor([[_START, *block]]))[0, -1].argmax()))
        texts.append(block.decode("utf-8", "ignore"))
    return texts
