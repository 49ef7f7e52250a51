"""params.yaml: what is wrong in it is said with file, line, field and remedy."""

import re
from pathlib import Path

import pytest
import yaml

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.params import parse_change, set_params
from tests.workspaces import PARAMS, ROOT

TEXT = yaml.safe_dump(PARAMS, sort_keys=False)

# What stands there, what is written instead, the line's text that is named, and the words.
WRONG = {
    "unknown key": ("steps: 30", "stps: 30", "stps", "train.stps: unknown key; did you mean 'ste"),
    "missing key": ("steps: 30\n  ", "", "train:", "train.steps: is missing"),
    "unknown section": ("evaluate:", "evaluat:", "evaluat:", "evaluat: unknown key; did you mean"),
    "in a list": ("mechanism: test", "mechanismus: x", "mechanismus", "residency.rules.0.mechanis"),
    "in a region": (
        "store: file:.convoy/stores/eu",
        "stor: x",
        "stor:",
        "regions.eu.stor: unk",
    ),
    "far from all": ("lr: 0.01", "lr: 0.01\n    zzz: 1", "zzz", "unknown key; known are name, lr,"),
    "text": ("steps: 30", "steps: many", "steps:", "train.steps: Input should be a valid integer"),
    "quoted number": ("steps: 30", "steps: '30'", "steps:", "train.steps: Input should be a valid"),
    "boolean": ("steps: 30", "steps: true", "steps:", "train.steps: Input should be a valid"),
    "fraction": ("steps: 30", "steps: 30.5", "steps:", "train.steps: Input should be a valid"),
    "zero": ("steps: 30", "steps: 0", "steps:", "train.steps: Input should be greater than 0"),
    "share": ("holdout: 0.1", "holdout: 1.5", "holdout:", "shard.holdout: Input should be less"),
    "no records": (
        "records_per_shard: 64",
        "records_per_shard: 0",
        "records_per",
        "greater than 0",
    ),
    "beta": ("lr: 0.01", "lr: 0.01\n    betas: [0.9, 1.0]", "betas", "train.optimizer.betas.1: "),
    "not finite": ("lr: 0.01", "lr: .inf", "lr:", "train.optimizer.lr: must be a finite number"),
    "too large": ("seed: 7", "seed: 90071992547409930", "seed:", "train.seed: must not be larger"),
    "Norway": ("jurisdiction: EU", "jurisdiction: NO", "jurisdiction:", "put it in quotes"),
    "bare date": ("'2099-12-31'", "2099-12-31", "expires:", 'put the date in quotes: "2099-12-31"'),
    "no date": ("'2099-12-31'", "'soon'", "expires:", "residency.rules.0.expires: Input should be"),
    "binary": (
        "hidden: 16",
        "hidden: !!binary aGk=",
        "hidden",
        "train.model.hidden: put the b",
    ),
    "number as key": ("hidden: 16", "1: 16", "model:", "train.model: put the key in quotes: '1'"),
    "twice": ("seed: 7", "seed: 7\n  seed: 8", "seed: 8", "train.seed: the key is there twice"),
    "open list": ("dataset: toy", "dataset: [toy", "workload:", "not YAML: while parsing a flow"),
    "tab": ("dataset: toy", "dataset: toy\n\tx: 1", "\tx: 1", "not YAML: while scanning"),
    "name of a region": ("  eu:\n", "  EU:\n", "EU:", "regions.EU.name: String should match"),
    "name inside": ("jurisdiction: EU", "name: x\n    jurisdiction: EU", "regions:", "remove the"),
    "no region": ("region: eu", "region: mars", "region: mars", "there is no region 'mars'; there"),
    "rule's region": ("- eu\n", "- mars\n", "rules:", "rule 'eu-rule': there is no region 'mars'"),
    "not uploaded": (
        "regions:\n  - eu\n  - us\n  - cn",
        "regions: [us]",
        "[us]",
        "must name train.",
    ),
    "one store": ("stores/us", "stores/eu", "regions:", "eu, us have one store: give each a store"),
    "store": ("file:.convoy/stores/eu", "ftp:x", "store: ftp", "regions.eu.store: unknown store"),
    "batch": ("global_batch: 32", "global_batch: 33", "train:", "must be a multiple of the 2 rep"),
    "world": ("dp_replicate: 2", "dp_replicate: 64", "train:", "must be a multiple of the 64 repl"),
    "accumulate": (
        "global_batch: 32",
        "global_batch: 32\n  accumulate: 17",
        "train:",
        "accumulate 17 is more than the 16 samples of a replica's batch",
    ),
    "microbatches": (
        "dp_replicate: 2",
        "dp_replicate: 2\n    pp: 8",
        "train:",
        "pipeline.microbatches 4 is less than the 8 stages of dims.pp",
    ),
    "parts of a batch": (
        "dp_replicate: 2",
        "dp_replicate: 1\n    pp: 2\n  pipeline:\n    microbatches: 5",
        "train:",
        "global_batch 32 must be a multiple of 1 replicas x 5 pipeline.microbatches: take 30 or 35",
    ),
    "stages of a schedule": (
        "global_batch: 32",
        "global_batch: 32\n  pipeline:\n    schedule: zbv_zero_bubble",
        "pipeline:",
        "stages_per_worker 1 does not fit schedule zbv_zero_bubble: take 2",
    ),
    "sequence": (
        "global_batch: 32",
        "global_batch: 32\n  sequence_parallel: true",
        "train:",
        "sequence_parallel splits work among the workers of dims.tp, which is 1",
    ),
    "cron": ("cron: null", "cron: daily", "cron:", "schedule.cron: must have five fields"),
    "time zone": ("cron: null", "timezone: Mars/X", "timezone", "there is no time zone 'Mars/X'"),
    "dataset": ("dataset: toy", "dataset: ../toy", "dataset:", "dataset: String should match"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, case: str) -> None:
    old, new, named, words = WRONG[case]
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        Config.load(path)
    message = str(refused.value)
    assert words in message
    line = next(n for n, found in enumerate(text.splitlines(), 1) if named.strip() in found)
    assert re.search(rf"{re.escape(str(path))}:{line}\b", message), (line, message)


def test_all_errors_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT.replace("steps: 30", "steps: x").replace("goal:", "gaol:"))
    with pytest.raises(ConfigError) as refused:
        Config.load(path)
    first, second = str(refused.value).splitlines()
    assert "train.steps: " in first
    assert "evaluate.gaol: unknown key; did you mean 'goal'?" in second


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "must be a mapping of sections"),
        (b"- a\n", "must be a mapping of sections"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"a: \x00", "not YAML"),
        (b"a: 2035-02-30", "not YAML: day is out of range"),
        (b"a: &a [*a]", "not YAML"),
        (None, "is missing: run this in a workspace"),
    ],
)
def test_what_is_no_params_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "params.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        Config.load(path)
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(path)


def test_a_url_that_may_hold_a_secret_is_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT.replace("file:.convoy/stores/eu", "s3://key:geheim@bucket/x?region=eu"))
    with pytest.raises(ConfigError) as refused:
        Config.load(path)
    assert "regions.eu.store" in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_changes_keep_comments_order_and_quotes(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = (ROOT / "params.yaml").read_text()
    path.write_text(before)
    config = set_params(path, {"train.steps": 7, "train.optimizer.lr": 0.5, "train.model.width": 8})
    assert (config.train.steps, config.train.optimizer.lr) == (7, 0.5)
    after = path.read_text()
    comments = re.compile(r"#.*")
    assert comments.findall(after) == comments.findall(before)
    changed = set(after.split("\n")) - set(before.split("\n"))
    assert {"  steps: 7", "    lr: 0.5", "    width: 8"} <= changed
    assert 'expires: "2035-12-31"' in after
    assert [p.name for p in tmp_path.iterdir()] == ["params.yaml"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("train.steps", "many", "train.steps: Input should be a valid integer"),
        ("train.stps", 5, "train.stps: unknown key; did you mean 'steps'?"),
        ("train.steps.more", 5, "what stands above 'more' is a list or a value"),
        ("residency.rules.name", "x", "what stands above 'name' is a list or a value"),
        ("nothing", 1, "nothing: unknown key"),
        ("train.global_batch", 33, "must be a multiple"),
    ],
)
def test_an_invalid_change_writes_nothing(
    tmp_path: Path, name: str, value: object, words: str
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TEXT)
    with pytest.raises(ConfigError) as refused:
        set_params(path, {"train.seed": 8, name: value})
    assert words in str(refused.value)
    assert str(path) in str(refused.value)
    assert ".new" not in str(refused.value)
    assert path.read_text() == TEXT
    assert [p.name for p in tmp_path.iterdir()] == ["params.yaml"]


def test_an_invalid_change_is_named_instead_of_a_line(tmp_path: Path) -> None:
    """The line would be one of a text that is in no file."""
    path = tmp_path / "params.yaml"
    path.write_text(TEXT)
    with pytest.raises(ConfigError) as refused:
        set_params(path, {"train.model.width": 8, "train.stps": 5})
    assert str(refused.value) == (
        f"with train.model.width = 8, train.stps = 5, which was not written: {path}: train.stps: "
        "unknown key; did you mean 'steps'?"
    )


def test_a_change_on_the_command_line() -> None:
    assert parse_change("train.steps=50") == ("train.steps", 50)
    assert parse_change("a=[1, x]") == ("a", [1, "x"])
    for text in ("train.steps", "=5", "a=[1", "a=2035-02-30"):
        with pytest.raises(ConfigError, match=re.escape(f"--set {text}: ")):
            parse_change(text)
