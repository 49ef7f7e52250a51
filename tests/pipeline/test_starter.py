"""`convoy init`: a workspace that works from each format, and one clear error for what cannot."""

import ast
import csv
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from data.manifest import Manifest, read_manifest
from data.shard import Split, open_shard
from data.sources import read_source
from pipeline import stages
from pipeline.config import Config
from pipeline.inspection import inspect_source
from pipeline.params import set_params
from pipeline.starter import Created, create_workspace
from pipeline.versioning import find_stale
from storage.errors import ConvoyError

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
WORDS = ("river", "mountain", "bright", "old", "quick", "paper", "stone", "winter", "garden")


def people(count: int = 160) -> list[dict[str, Any]]:
    draw = random.Random(0)
    rows = []
    for index in range(count):
        age, work = draw.randint(18, 80), draw.choice(["clerk", "farmer", "nurse"])
        rows.append(
            {
                "id": index,
                "country": ("EU", "EU", "US", "United Kingdom")[index % 4],
                "age": age if index % 9 else None,
                "work": work if index % 7 else None,
                "story": " ".join(draw.choices(WORDS, k=6)),
                "rich": "yes" if age > 45 else "no",
                "price": age * 100 + draw.random(),
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0], delimiter=";")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n\n".join(row["story"] for row in rows))
    return path


def create(source: Path, name: str, **options: str | None) -> Created:
    defaults: dict[str, str | None] = dict.fromkeys(
        ("jurisdiction_field", "jurisdiction", "target", "train_in", "group")
    )
    return create_workspace(source.parent, name, source, **(defaults | options))


def shard(created: Created, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.chdir(created.path)
    config = Config.load()
    stages.ingest(config)
    return stages.shard(config)


@pytest.mark.parametrize(
    ("file", "name", "options"),
    [
        ("people.csv", "csv_class", {"target": "rich"}),
        ("people.csv", "csv_number", {"target": "price", "train_in": "United Kingdom"}),
        ("people.csv", "csv_text", {}),
        ("people.jsonl", "jsonl_class", {"target": "rich"}),
        ("people.parquet", "parquet_number", {"target": "price"}),
    ],
)
def test_records_of_each_format_are_sharded(
    file: str,
    name: str,
    options: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = write(tmp_path / file, people())
    created = create(source, name, jurisdiction_field="country", **options)
    counts = shard(created, monkeypatch).count_records()
    assert set(counts) == {"EU", "US", "United-Kingdom"}
    if "target" in options:
        assert counts == {"EU": 80, "US": 40, "United-Kingdom": 40}
    written = yaml.safe_load(Path("params.yaml").read_text())
    named = yaml.safe_load(Path("dvc.yaml").read_text())["stages"].values()
    assert {section for stage in named for section in stage["params"]} <= set(written)
    config = Config.load()
    assert config.train.global_batch * 2 <= 0.8 * counts[config.site.jurisdiction]
    assert config.site.jurisdiction == options.get("train_in", "EU").replace(" ", "-")
    for place in config.regions.values():
        allowed = [j for j in counts if config.residency.decide(j, "shard", place.name).allowed]
        assert allowed == [place.jurisdiction]


def test_lines_of_a_text_are_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    created = create(write(tmp_path / "book.txt", people()), "text_lines", jurisdiction="EU")
    assert set(shard(created, monkeypatch).count_records()) == {"EU"}


CHAIN = """
from pipeline import stages
from pipeline.config import Config
config = Config.load()
for stage in stages.STAGES.values():
    stage(config)
"""


def run_chain(created: Created, more: str) -> tuple[dict[str, Any], list[str]]:
    """All stages with few steps, then the code in the README and `more`; what that printed."""
    root = created.path
    changes = {
        "train.steps": 6,
        "train.optimizer.warmup_steps": 1,
        "train.checkpoint.every_steps": 6,
    }
    set_params(root / "params.yaml", changes)
    run_python(root, CHAIN)
    metrics = json.loads((root / "artifacts/evaluate/metrics.json").read_text())
    shown = (root / "README.md").read_text().split("```python\n")[1].split("```")[0]
    return metrics, run_python(root, shown + more).splitlines()


def run_python(root: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


SERVE_OWN_ROWS = """
import pandas
import warnings
warnings.simplefilter("ignore")
frame = pandas.read_parquet("../people.parquet")
assert str(frame.dtypes["work"]) == "category" and str(frame.dtypes["born"]).startswith("date")
answers = list(model.predict(frame))
print(len(answers), set(answers) <= {"yes", "no"})
"""
COMPARE_INPUTS = """
import pathlib
import pandas
import people_class as workload
from training.served_model import _rows
frame = pandas.read_parquet("../people.parquet")
served = [workload.features(workload.read_fields(row, workload.TYPES)) for row in _rows(frame)]
records = list(workload.records(pathlib.Path("datasets/people_class")))
print(served == [workload.features(record.fields) for record in records], len(served[0]))
"""


def test_a_classifier_answers_rows_of_its_own_parquet(tmp_path: Path) -> None:
    """Categories, dates, booleans and missing values are served as they were trained on."""
    start = datetime(2020, 1, 1)
    rows = [
        row | {"born": start - timedelta(days=i), "calm": i % 3 == 0 or None, "tags": ["a", "b"]}
        for i, row in enumerate(people())
    ]
    table = pa.Table.from_pylist(rows)
    work = table.column("work").dictionary_encode()
    table = table.set_column(table.schema.get_field_index("work"), "work", work)
    pq.write_table(table, tmp_path / "people.parquet")
    created = create(
        tmp_path / "people.parquet", "people_class", jurisdiction_field="country", target="rich"
    )
    assert {
        "numbers: age, price", "dates: born", "categories: work, calm", "texts: story",
        "left out: 'tags' holds lists or mappings", "left out: 'id' only counts the records",
    } <= set(created.found)  # fmt: skip
    metrics, printed = run_chain(created, SERVE_OWN_ROWS)
    assert set(metrics) == {"accuracy", "auc", "loss", "majority"}
    assert metrics["majority"]["auc"] == 0.5
    assert len(printed) == 2
    assert printed[1] == "160 True"
    width = 2 * 2 + 6 + 512
    assert run_python(created.path, COMPARE_INPUTS) == f"True {width}\n"


def test_a_language_model_is_trained_and_registered(tmp_path: Path) -> None:
    source = write(tmp_path / "book.txt", people())
    created = create(source, "book_text", jurisdiction="EU")
    more = 'print(model.predict([{"prefix": "ri"}])[0].startswith("ri"))'
    metrics, printed = run_chain(created, more)
    assert set(metrics) == {"bits_per_byte", "unigram", "trigram"}
    assert metrics["trigram"]["bits_per_byte"] < metrics["unigram"]["bits_per_byte"] < 8
    assert len(printed) == 2
    assert printed[1] == "True"


def read_split(created: Created, split: Split) -> list[dict[str, Any]]:
    """Every record of a split, from the shards."""
    folder = created.path / "artifacts/shard"
    shards = read_manifest(folder / "manifest.json").of(split)
    return [
        dict(row)
        for part in shards
        for row in open_shard(part, (folder / "shards" / part.name).read_bytes(), "here")
    ]


def test_a_text_is_held_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts carry its number, so that a text on both sides would show."""
    texts = [f"<{i:04}>" * (1 + i * 7 % 120) for i in range(300)]
    rows = [{"lang": "de", "body": text} for text in (*texts, *texts[:50])]
    created = create(
        write(tmp_path / "texts.jsonl", rows), "whole_texts", jurisdiction_field="lang"
    )
    counts = shard(created, monkeypatch).count_records()
    told = f"350 records of de; its texts there are cut into {counts['de']} samples of at most 128"
    assert any(sentence.startswith("training in") for sentence in created.found)
    assert told.split("; ")[1] in "; ".join(created.found)

    def numbers(split: Split) -> set[bytes]:
        parts = b" ".join(row["bytes"] for row in read_split(created, split))
        return set(re.findall(rb"<(\d{4})>", parts))

    train, holdout = numbers("train"), numbers("holdout")
    assert not train & holdout
    assert len(train | holdout) == 300
    assert 15 < len(holdout) < 45


def test_the_held_out_records_stay_when_features_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "people.csv", people())
    created = create(source, "features_go", jurisdiction_field="country", target="rich")
    shard(created, monkeypatch)
    before = [row["price"] for row in read_split(created, "holdout")]
    module = created.path / "features_go.py"
    code = module.read_text()
    module.write_text(code.replace('("age", "price")', '("price",)').replace('("story",)', "()"))
    monkeypatch.delitem(sys.modules, "features_go")
    shard(created, monkeypatch)
    after = read_split(created, "holdout")
    assert set(after[0]) == {"price", "rich", "work"}
    assert [row["price"] for row in after] == before
    assert 20 < len(before) < 60


def test_odd_cells_do_not_make_a_category_of_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row | {"weight": f"{50 + i * 7 % 60},{i % 10}", "half": i if i % 2 else "geheim",
               "near": i if i % 20 else "geheim", "born": f"1970-01-{1 + i % 28:02}"}
        for i, row in enumerate(people(400))
    ]  # fmt: skip
    rows[100]["age"] = rows[300]["age"] = rows[200]["weight"] = rows[100]["born"] = "geheim"
    source = write(tmp_path / "people.csv", rows)
    created = create(source, "odd_cells", jurisdiction_field="country", target="rich")
    found = created.found
    assert "numbers: age, price, weight" in found
    assert "dates: born" in found
    assert "in 'weight' a comma is read as the decimal point" in found
    missing = "what is none counts as missing"
    assert (
        f"'age' looks like a number, but {source}:102 holds none, nor do 1 more records; {missing}"
        in found
    )
    assert f"'weight' looks like a number, but {source}:202 holds none; {missing}" in found
    assert f"'born' looks like a date, but {source}:102 holds none; {missing}" in found
    [near] = [sentence for sentence in found if sentence.startswith("'near' looks like a number")]
    assert f"{source}:2 holds none, nor do 19 more records; it is read as text: correct" in near
    assert not [sentence for sentence in found if sentence.startswith("'half' looks")]
    written = "".join(p.read_text() for p in created.path.iterdir() if p.is_file())
    assert "geheim" not in "".join(found) + written
    shard(created, monkeypatch)
    read = read_split(created, "train") + read_split(created, "holdout")
    by_price = {row["price"]: row for row in read}
    first, odd = by_price[rows[1]["price"]], by_price[rows[100]["price"]]
    assert (first["weight"], first["age"], first["born"]) == (57.1, rows[1]["age"], 1.0)
    assert (odd["weight"], odd["age"], odd["born"]) == (90.0, None, None)
    rows[7]["price"] = "geheim"  # a field that was clean
    write(source, rows)
    with pytest.raises(ConvoyError, match=r"people\.csv:9: field 'price' is no number"):
        shard(created, monkeypatch)


def test_commas_that_may_part_thousands_are_no_decimal_points(tmp_path: Path) -> None:
    rows = [{"sum": f"{i % 90 + 10},{i % 9:03}", "land": "EU"} for i in range(400)]
    summary = inspect_source(write(tmp_path / "sums.csv", rows))
    assert summary.find("sum", "--target").kind == "category"


def places_with_slips() -> list[dict[str, Any]]:
    names = ["Germany", "France", "US", "NA", "Norway", "Bavaria"] * 60
    names += ["N/A", "Germny", "Lativa", "Elbonia"]
    return [{"land": name, "n": i * 7 % 50, "y": "ab"[i % 2]} for i, name in enumerate(names)]


def test_jurisdictions_that_look_amiss_are_said(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", places_with_slips())
    created = create(source, "amiss", jurisdiction_field="land", target="y")
    said = [s for s in created.found if "jurisdiction " in s or "members" in s]
    expected = [
        r"NA \(60 records\) is Namibia by its ISO code: if it stands for nothing given",
        r"N-A \(1 record\) looks as if none were known",
        r"Germny \(1 record\) has a region of its own: should it be Germany\?",
        r"Lativa \(1 record\) has a region of its own: should it be Latvia\?",
        r"Elbonia \(1 record\) is rare",
        r"Germany, France are members of the EU, .* `convoy init --group EU` makes one of them",
    ]
    for sentence, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, sentence), sentence


def test_members_of_a_union_are_one_jurisdiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lands = ("DE", "FRA", "Czech Republic", "EU", "US", "the netherlands", "de", "CH")
    rows = [{"land": lands[i % 8], "n": i * 7 % 50, "y": "ab"[i % 2]} for i in range(400)]
    source = write(tmp_path / "a.csv", rows)
    options: dict[str, str | None] = {"target": "y", "group": "EU", "train_in": "Germany"}
    created = create(source, "grouped", jurisdiction_field="land", **options)
    assert shard(created, monkeypatch).count_records() == {"EU": 250, "US": 50, "de": 50, "CH": 50}
    config = Config.load()
    assert config.site.jurisdiction == "EU"
    assert set(config.regions) == {"eu", "us", "de", "ch"}
    assert not [sentence for sentence in created.found if "members of the EU" in sentence]
    write(source, [*rows, {"land": "Malta", "n": 1, "y": "a"}])  # not there before
    assert shard(created, monkeypatch).count_records()["EU"] == 251


@pytest.mark.parametrize("target", ["rich", "price", None])
def test_the_module_is_tidy_and_imports_only_the_record(tmp_path: Path, target: str | None) -> None:
    source = write(tmp_path / "people.jsonl", people())
    created = create(source, "tidy", jurisdiction_field="country", target=target)
    module = created.path / "tidy.py"
    for command in (["check"], ["format", "--check"]):
        config = ["--config", str(ROOT / "pyproject.toml")]
        done = subprocess.run(
            [BIN / "ruff", *command, *config, module], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
    at_top = [n for n in ast.parse(module.read_text()).body if isinstance(n, ast.ImportFrom)]
    served = ["data.record", "data.values"]
    assert [n.module for n in at_top if str(n.module).startswith("data")] == served


def test_no_value_of_a_record_is_written_but_classes_and_jurisdictions(tmp_path: Path) -> None:
    source = write(tmp_path / "people.csv", people())
    created = create(source, "discreet", jurisdiction_field="country", target="rich")
    assert 'CLASSES: tuple[str, ...] = ("no", "yes")' in (created.path / "discreet.py").read_text()
    for file in created.path.iterdir():
        if file.is_file():
            words = set(file.read_text().replace('"', " ").replace("'", " ").split())
            assert not words & {"river", "clerk", "farmer", "nurse"}, file


def test_versions_are_kept_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(variable, "Test")
    for variable in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(variable, "test@example.org")
    created = create(write(tmp_path / "book.txt", people()), "kept", jurisdiction="EU")
    assert created.next_steps == (f"cd {created.path}", "convoy run", "convoy report")
    assert git(created.path, "status", "--porcelain") == ""
    tracked = git(created.path, "ls-files").split()
    assert set(tracked) == {
        ".dvc/.gitignore", ".dvc/config", ".dvcignore", ".gitignore",
        "README.md", "dvc.yaml", "kept.py", "params.yaml",
    }  # fmt: skip
    assert "analytics = False" in (created.path / ".dvc/config").read_text()


def test_without_a_git_user_the_commit_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{role}_NAME", raising=False)
        monkeypatch.delenv(f"GIT_{role}_EMAIL", raising=False)
    monkeypatch.delenv("EMAIL", raising=False)
    created = create(write(tmp_path / "book.txt", people()), "userless", jurisdiction="EU")
    assert any("git config user.name" in step for step in created.next_steps)
    assert "params.yaml" in git(created.path, "diff", "--cached", "--name-only")


def git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


def test_dvc_stages_are_those_of_the_repository_and_watch_the_input() -> None:
    ours = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    theirs = yaml.safe_load((ROOT / "pipeline/templates/dvc.yaml").read_text())
    assert theirs["stages"]["ingest"]["deps"].pop() == "${ingest.source}"
    assert theirs == ours


def test_odd_names_are_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norway is not false, and neither quotes nor scripts break what is written."""
    odd = "a \"b\" \\ 'c': #"
    places = ("NO", "Côte d'Ivoire", "中国", "日本")
    rows = [{"where?": places[i % 4], odd: f"é{i % 2}", "n": i * 7 % 50} for i in range(160)]
    created = create(
        write(tmp_path / "odd file's.jsonl", rows), "odd", jurisdiction_field="where?", target=odd
    )
    assert shard(created, monkeypatch).count_records() == {
        "NO": 40, "Côte-d-Ivoire": 40, "中国": 40, "日本": 40,
    }  # fmt: skip
    assert set(Config.load().regions) == {"no", "cote-d-ivoire", "region", "region-2"}


def test_a_file_is_summarised_without_its_values(tmp_path: Path) -> None:
    summary = inspect_source(write(tmp_path / "people.csv", people()))
    kinds = {field.name: field.kind for field in summary.fields}
    assert (summary.format, summary.num_records) == ("csv", 160)
    assert kinds == {
        "id": "serial", "country": "category", "age": "number", "work": "category",
        "story": "text", "rich": "category", "price": "number",
    }  # fmt: skip
    assert summary.likely_jurisdictions == ("country",)
    shown = {field.name: field.values for field in summary.fields if field.values}
    assert shown == {"country": (("EU", 80), ("US", 40), ("United Kingdom", 40))}
    assert summary.find("age", "--target").num_empty == 18


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda i: f"c{i}", "identifier"),
        (lambda i: f"{i * 7919:08x}-{i:04x}", "identifier"),
        (lambda i: f"{i * 7919} {i:04}", "text"),  # more than a word
        (lambda i: f"c{i % 100}", "text"),  # comes twice
        (lambda i: "C1" * (i + 1), "text"),  # of any length, as the formula of a molecule is
        (lambda i: "ab"[i % 2] + "cd"[i // 2 % 2] + "ef"[i // 4 % 2] + chr(192 + i), "text"),
    ],
)
def test_a_text_that_only_tells_records_apart(
    tmp_path: Path, value: Callable[[int], str], kind: str
) -> None:
    rows = [{"key": value(i), "country": "EU"} for i in range(160)]
    summary = inspect_source(write(tmp_path / "keys.csv", rows))
    assert summary.find("key", "--target").kind == kind


def test_its_readme_names_the_model_and_nothing_has_run(tmp_path: Path) -> None:
    created = create(
        write(tmp_path / "a.csv", people()), "my_data", jurisdiction_field="country", target="rich"
    )
    name = yaml.safe_load((created.path / "params.yaml").read_text())["register"]["model_name"]
    assert f"models:/{name}@champion" in (created.path / "README.md").read_text()
    assert find_stale(created.path, "ingest") == ["not run before"]


def test_identifiers_are_no_feature_unless_nothing_else_is_there(tmp_path: Path) -> None:
    rows = [
        {"key": f"user-{i:04}", "country": "EU", "age": i * 7 % 50, "rich": "ny"[i % 2]}
        for i in range(160)
    ]
    said = "left out: 'key' is an identifier, another in every record"
    created = create(
        write(tmp_path / "a.csv", rows), "a", jurisdiction_field="country", target="rich"
    )
    assert said in created.found
    alone = [{name: row[name] for name in ("key", "country", "rich")} for row in rows]
    created = create(
        write(tmp_path / "b.csv", alone), "b", jurisdiction_field="country", target="rich"
    )
    assert said not in created.found
    assert any(sentence.endswith("'rich' is, from key") for sentence in created.found)


HEADER = "country,word,amount\n"
GOOD = "EU,river,1\n" * 30


def test_files_with_their_own_habits_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbf, b ,c\r\n1,"two\nlines, 1",NA\r\n\r\n2,,3\r\n')
    assert list(read_source(path)) == [
        {"column_1": "1", "b": "two\nlines, 1", "c": "NA"},
        {"column_1": "2", "b": "", "c": "3"},
    ]


@pytest.mark.parametrize(
    ("file", "content", "options", "message"),
    [
        ("a.csv", None, {}, r"there is no file .*a\.csv"),
        ("a.xls", b"x", {}, r"a\.xls: files ending in '\.xls' are not read; known are \.csv"),
        ("a.csv", b"", {}, r"a\.csv holds no record"),
        ("a.csv", HEADER, {}, r"a\.csv holds no record, but names of columns alone: write"),
        ("a.csv", HEADER + GOOD + "EU,river\n", {}, r"a\.csv:32: 2 fields, .* header names 3"),
        ("a.csv", HEADER + GOOD + 'EU,"river,1\n', {}, r"a\.csv:32: not csv .* not closed"),
        ("a.csv", "a,a\n1,2\n", {}, r"a\.csv:1: two columns are named 'a': rename"),
        ("a.csv", HEADER.encode() + b"EU,\xff,1\n", {}, r"a\.csv:2: byte 4 .* not UTF-8: save"),
        ("a.jsonl", '{"a": 1}\n{"a"\n', {}, r"a\.jsonl:2: not JSON .* one object a line"),
        ("a.jsonl", "[1]\n", {}, r"a\.jsonl:1: not a JSON object"),
        ("a.parquet", b"PAR1 no", {}, r"a\.parquet: row 1: parquet cannot be read"),
        (
            "a.csv",
            HEADER + GOOD,
            {"jurisdiction_field": "land"},
            r"no field 'land'; it has country",
        ),
        ("a.csv", HEADER + GOOD, {"target": "land"}, r"--target: .*no field 'land'"),
        ("a.csv", HEADER + GOOD, {"target": "country"}, r"'country' is already the jurisdiction"),
        ("a.csv", HEADER + GOOD, {"target": "word"}, r"'word' has one value alone"),
        ("a.csv", HEADER + GOOD, {"jurisdiction_field": None}, r"likely: country; fields: country"),
        (
            "a.csv",
            HEADER + GOOD,
            {"train_in": "US"},
            r"--train-in: no record .* 'US'; .* EU \(30\)",
        ),
        ("a.csv", HEADER + "EU,river,1\n" * 5, {}, r"EU has 5 records, too few .* Bring more$"),
        (
            "a.csv",
            HEADER + GOOD + "US,river,1\n" * 5,
            {"train_in": "US"},
            r"Bring more, or name another jurisdiction by --train-in$",
        ),
        ("a.csv", HEADER + GOOD, {"group": "ASEAN"}, r"--group: 'ASEAN' is not known; .* EU"),
        (
            "a.csv",
            HEADER + GOOD,
            {"jurisdiction_field": None, "jurisdiction": "EU", "group": "EU"},
            r"--group .* give --jurisdiction-field",
        ),
        ("a.txt", "a line\n", {"jurisdiction_field": None}, r"Lines of text do not say: .* EU$"),
        (
            "a.csv",
            HEADER + GOOD * 10 + "EU,river,geheim\n",
            {"target": "amount"},
            r"'amount' looks like a number, but .*a\.csv:302 holds none: correct",
        ),
        (
            "a.csv",
            HEADER + GOOD + " ,river,1\n-,river,2\n",
            {},
            r"a\.csv:32: field 'country' is empty, as in 2 of 32 records: .* Fill it in",
        ),
        (
            "a.csv",
            HEADER + GOOD + "EU,,1\nEU,stone,2\n",
            {"target": "word"},
            r"a\.csv:32: field 'word' is empty, as in 1 of 32 records",
        ),
        (
            "a.csv",
            HEADER + "".join(f"Land {i},river,1\n" for i in range(41)),
            {},
            r"field 'country' has 41 distinct values; it is hardly a jurisdiction",
        ),
        (
            "a.csv",
            HEADER + "".join(f"Land {i},river,1\n" for i in range(300)),
            {},
            r"field 'country' has more than 250 distinct values; it is hardly a jurisdiction",
        ),
    ],
)
def test_a_file_that_cannot_serve_is_refused(
    tmp_path: Path,
    file: str,
    content: str | bytes | None,
    options: dict[str, str | None],
    message: str,
) -> None:
    source = tmp_path / file
    if content is not None:
        source.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConvoyError, match=message):
        create(source, "refused", **({"jurisdiction_field": "country"} | options))
    assert not (tmp_path / "refused").exists()
    assert not list(tmp_path.glob(".refused*"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-data", "cannot name a Python module: .* for example my_data$"),
        ("2024", "for example data_2024$"),
        ("class", "for example data_class$"),
        ("a/b", "for example a_b$"),
        ("json", "already the name of a Python module: .* my_json"),
        ("data", "already the name of a Python module"),
        ("taken", "is already there, and nothing is overwritten"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused(tmp_path: Path, name: str, message: str) -> None:
    source = write(tmp_path / "book.txt", people())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("kept")
    with pytest.raises(ConvoyError, match=message):
        create(source, name, jurisdiction="EU")
    assert (tmp_path / "taken" / "precious").read_text() == "kept"


def test_a_broken_record_that_comes_later_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New input is not what init saw: the field and the line are named, the value is not."""
    source = write(tmp_path / "people.jsonl", people())
    created = create(source, "later", jurisdiction_field="country", target="rich")
    row = {"country": "EU", "age": "12 years", "work": "clerk", "story": "old", "rich": "no"}
    changes: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
        (lambda row: row, r"people\.jsonl:161: field 'age' is no number: correct it"),
        (lambda row: row | {"age": 12, "country": None}, r":161: field 'country' is empty: fill"),
        (
            lambda row: row | {"age": 12, "rich": "perhaps"},
            r":161: field 'rich' is none of no, yes, but another .*, or add it to CLASSES"
            r" \(in \.\./people\.jsonl, of which this is Convoy's copy",
        ),
    ]
    for change, message in changes:
        write(source, [*people(), change(row)])
        with pytest.raises(ConvoyError, match=message) as raised:
            shard(created, monkeypatch)
        assert "12 years" not in str(raised.value)
        assert "perhaps" not in str(raised.value)
