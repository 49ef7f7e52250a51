"""The place names workload: its records, its batches, its measure and what it has to beat."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from data.record import Record
from examples import place_names
from examples.ngram import NGram

PARIS = {"country": "FR", "name": "Paris", "own_name": "", "population": 2138551}
BEIJING = {"country": "CN", "name": "Beijing", "own_name": "北京", "population": 18960744}
YPRES = {"country": "BE", "name": "Y", "own_name": "", "population": 1}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("raw")
    place_names.ingest(directory, min_population=100_000)
    return directory


@pytest.fixture(scope="module")
def places(raw: Path) -> dict[tuple[str, str], Record]:
    return {(r.fields["country"], r.fields["name"]): r for r in place_names.records(raw)}


def test_ingest_writes_the_same_bytes_again(raw: Path, tmp_path: Path) -> None:
    place_names.ingest(tmp_path, min_population=100_000)
    written = {path.name: path.read_bytes() for path in raw.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
    assert {"EU.jsonl", "UK.jsonl", "CH.jsonl", "US.jsonl", "CN.jsonl"} <= set(written)


def test_a_file_holds_one_jurisdiction(raw: Path) -> None:
    for path in raw.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines()
        assert {json.loads(line)["jurisdiction"] for line in lines} == {path.stem}


def test_records_come_in_the_same_order_again(raw: Path) -> None:
    assert list(place_names.records(raw)) == list(place_names.records(raw))


@pytest.mark.parametrize(
    ("country", "name", "jurisdiction", "own_name"),
    [
        ("FR", "Paris", "EU", ""),
        ("GB", "London", "UK", ""),
        ("CH", "Zürich", "CH", ""),
        ("US", "Chicago", "US", ""),
        ("BR", "São Paulo", "BR", ""),
        ("CN", "Beijing", "CN", "北京"),
        ("CN", "Shanghai", "CN", "上海"),
        ("JP", "Tokyo", "JP", "東京"),
        ("IN", "Delhi", "IN", "दिल्ली"),
        ("RU", "Moscow", "RU", "Москва"),
        ("UA", "Kyiv", "UA", "Київ"),
        ("BG", "Sofia", "EU", "София"),
        ("GR", "Piraeus", "EU", "Πειραιάς"),
        ("KR", "Seoul", "KR", "서울"),
        ("TH", "Bangkok", "TH", "กรุงเทพ"),
    ],
)
def test_known_places(
    places: dict[tuple[str, str], Record],
    country: str,
    name: str,
    jurisdiction: str,
    own_name: str,
) -> None:
    record = places[country, name]
    assert record.jurisdiction == jurisdiction
    assert record.fields["own_name"] == own_name
    assert record.fields["population"] >= 100_000


def test_every_place_fits_the_length_it_was_asked_for(tmp_path: Path) -> None:
    place_names.ingest(tmp_path, min_population=100_000, max_length=12)
    rows = [record.fields for record in place_names.records(tmp_path)]
    tokens, _ = place_names.collate(rows)
    assert tokens.shape[1] == 12
    assert any(row["own_name"] for row in rows)


def test_too_small_a_population_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_population is 10"):
        place_names.ingest(tmp_path, min_population=10)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"country": "FR", "name": "Lyon"}', "'jurisdiction' is missing"),
        ('{"country": "FR", "name": "Lyon", "jurisdiction": ""}', "'jurisdiction' is missing"),
        ('{"country": "FR", "jurisdiction": "EU"}', "'name' is missing"),
        ('{"country": "fr", "name": "Lyon", "jurisdiction": "EU"}', "not two capital letters"),
        ('["FR"]', "not a JSON object"),
        ('{"country": "FR"', "delimiter"),
    ],
)
def test_a_line_that_is_no_place_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = '{"country": "FR", "name": "Paris", "jurisdiction": "EU"}'
    (tmp_path / "EU.jsonl").write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message) as caught:
        list(place_names.records(tmp_path))
    assert f"{tmp_path / 'EU.jsonl'}:2: " in str(caught.value)


def test_control_characters_cannot_forge_the_form_of_a_line(tmp_path: Path) -> None:
    row = {"country": "FR", "name": "Par\tis\n", "jurisdiction": "EU"}
    (tmp_path / "EU.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (record,) = place_names.records(tmp_path)
    assert record.fields["name"] == "Par is"


def test_collate_predicts_every_byte_after_the_country() -> None:
    tokens, targets = place_names.collate([PARIS, BEIJING])
    line = "CNBeijing\t北京\n".encode()
    assert tokens.shape == targets.shape == (2, len(line) - 1)
    assert tokens.dtype == targets.dtype == torch.int64
    assert bytes(tokens[1].tolist()) == line[:-1]
    assert targets[1].tolist() == [-100, *line[2:]]
    assert bytes(tokens[0].tolist()) == b"FRParis\n" + bytes(len(line) - 9)
    assert targets[0].tolist() == [-100, *b"Paris\n"] + [-100] * (len(line) - 8)


def _logits(targets: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*targets.shape, 256, generator=generator)


def _nats(row: dict[str, Any], logits: Tensor) -> float:
    line = (row["country"] + row["name"]).encode()
    line += (b"\t" + row["own_name"].encode() if row["own_name"] else b"") + b"\n"
    chances = logits.log_softmax(dim=-1)
    return -sum(float(chances[i - 1, line[i]]) for i in range(2, len(line)))


def test_loss_is_nats_a_place_and_metrics_are_the_same_in_bits_a_byte() -> None:
    rows = [PARIS, BEIJING]
    _, targets = place_names.collate(rows)
    logits = _logits(targets)
    nats = sum(_nats(row, part) for row, part in zip(rows, logits, strict=True))
    loss = place_names.loss(logits, targets)
    assert loss.shape == ()
    assert float(loss) == pytest.approx(nats / 2, rel=1e-5)
    bits, num_bytes = place_names.metrics(logits, targets)["bits_per_byte"]
    assert num_bytes == len(b"Paris\n") + len("Beijing\t北京\n".encode())
    assert bits == pytest.approx(float(loss) * 2 / math.log(2), rel=1e-6)


def test_loss_of_a_batch_is_the_mean_of_its_halves() -> None:
    rows = [PARIS, BEIJING, YPRES, PARIS]
    _, targets = place_names.collate(rows)
    logits = _logits(targets)
    halves = []
    for half in (slice(0, 2), slice(2, 4)):
        _, part = place_names.collate(rows[half])
        halves.append(place_names.loss(logits[half, : part.shape[1]], part))
    whole = place_names.loss(logits, targets)
    assert float(whole) == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


def test_unigram_by_hand() -> None:
    scorers = place_names.baselines(iter([PARIS]))
    # Six bytes were seen, all different: p = (1 + 6/256) / (6 + 6) for "P" and "\n"; "x" was not.
    seen, unseen = (1 + 6 / 256) / 12, (6 / 256) / 12
    row = {**PARIS, "name": "Px"}
    bits, num_bytes = scorers["unigram"]([row])["bits_per_byte"]
    assert num_bytes == 3
    assert bits == pytest.approx(-2 * math.log2(seen) - math.log2(unseen))


def test_trigrams_by_hand() -> None:
    scorers = place_names.baselines([YPRES, YPRES, YPRES])
    # "BEY\n" three times. Without context: "Y" and "\n", 3 of 6 each, 2 different bytes. In every
    # longer context 3 bytes, all the same: p = (3 + p of the shorter) / (3 + 1).
    zero = (3 + 2 / 256) / 8
    one = (3 + zero) / 4
    two = (3 + one) / 4
    three = (3 + two) / 4
    for name, chance in (("trigram", two), ("country_trigram", three)):
        bits, num_bytes = scorers[name]([YPRES])["bits_per_byte"]
        assert bits == pytest.approx(-2 * math.log2(chance))
        assert num_bytes == 2
        # In another country "Y" comes in a context never seen, and "\n" after one seen byte.
        bits, _ = scorers[name]([{**YPRES, "country": "GB"}])["bits_per_byte"]
        assert bits == pytest.approx(-math.log2(zero) - math.log2(one))


def test_a_baseline_spends_a_whole_probability() -> None:
    ngram = NGram([b"FRParis\n", b"FRPau\n"], place_names._country_trigram_contexts, 2)
    for line in (b"FRPar", b"FRPax", b"DE\xffz"):
        chances = [ngram.chance(line[:-1] + bytes([byte]), len(line) - 1) for byte in range(256)]
        assert sum(chances) == pytest.approx(1)


class Writes(nn.Module):
    """Stands for a model: writes one fixed line, whatever it has read."""

    def __init__(self, line: bytes, max_length: int = 32) -> None:
        super().__init__()
        self.line = line
        self.max_length = max_length

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.shape[1] <= self.max_length
        logits = torch.zeros(*tokens.shape, 256)
        logits[:, -1, self.line[min(tokens.shape[1], len(self.line) - 1)]] = 50.0
        return logits


def test_predict_completes_a_prefix() -> None:
    model = Writes("CNBeijing\t北京\n".encode())
    rows = [{"country": "CN", "prefix": prefix} for prefix in ("", "Bei", "Beijing")]
    assert place_names.predict(model, rows) == ["Beijing (北京)"] * 3
    assert place_names.predict(Writes(b"FRParis\n"), [{"country": "FR", "prefix": "P"}]) == [
        "Paris"
    ]


@pytest.mark.parametrize("length", range(3, 18))
def test_predict_never_cuts_a_character(length: int) -> None:
    model = Writes("CNBeijing\t北京\n".encode(), max_length=length)
    (name,) = place_names.predict(model, [{"country": "CN", "prefix": ""}])
    whole = "Beijing (北京)"
    assert name == whole or whole.startswith(name.removesuffix(")"))
    assert "\ufffd" not in name


def test_predict_is_greedy_unless_asked_and_the_same_for_a_seed() -> None:
    torch.manual_seed(0)
    model = place_names.model(width=16, num_layers=1, num_heads=2).eval()
    nan = float("nan")

    def names(**options: Any) -> list[str]:
        row = {"country": "FR", "prefix": "Saint-", **options}
        return place_names.predict(model, [row])

    assert names() == names(temperature=0.0, seed=5) == names(temperature=None, seed=nan)
    assert names(temperature=1.0, seed=1) == names(temperature=1.0, seed=1)
    assert len({names(temperature=1.0, seed=seed)[0] for seed in range(5)}) > 1
    assert names()[0].startswith("Saint-")


def test_predict_answers_its_example() -> None:
    torch.manual_seed(0)
    model = place_names.model(width=16, num_layers=1, num_heads=2).eval()
    names = place_names.predict(model, place_names.example)
    assert [type(name) for name in names] == [str, str]


def test_the_model_sees_no_byte_to_come_and_refuses_what_is_too_long() -> None:
    torch.manual_seed(0)
    model = place_names.model(max_length=8, width=16, num_layers=2, num_heads=2).eval()
    tokens = torch.randint(0, 256, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = 0
    before = cast(Tensor, model(tokens))
    assert torch.equal(before[:, :5], cast(Tensor, model(changed))[:, :5])
    with pytest.raises(ValueError, match="max_length is 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_the_model_learns_two_places() -> None:
    torch.manual_seed(0)
    model = place_names.model(width=32, num_layers=1, num_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, targets = place_names.collate([PARIS, BEIJING])
    for _ in range(60):
        optimizer.zero_grad()
        place_names.loss(model(tokens), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    rows = [{"country": "FR", "prefix": ""}, {"country": "CN", "prefix": ""}]
    assert place_names.predict(model.eval(), rows) == ["Paris", "Beijing (北京)"]


def test_importing_the_workload_loads_no_torch() -> None:
    code = "import sys, examples.place_names, examples.digits; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "False"
