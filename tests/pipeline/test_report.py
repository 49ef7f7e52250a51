"""The page of `convoy report`, on nouns built in code and once in a browser."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import rfc8785

from data.manifest import Manifest
from data.residency import Exclusion
from data.shard import Shard
from data.upload import PlacedShard, UploadReceipt
from pipeline import workspace
from pipeline.config import Config
from pipeline.errors import WorkspaceError
from pipeline.findings import read_findings
from pipeline.lineage import digest_config, digest_training
from pipeline.report import compare, format_metric, format_size, render_report, write_report
from pipeline.stages import STAGES, TrainReport
from training.evaluate import Metrics, Score
from training.goodput import Stretch, measure_goodput
from training.incidents import Incident
from training.registry import ModelVersion

NOW = datetime(2030, 5, 1, 12, 0, tzinfo=UTC)
HTML = "<script>document.title = 'broken'</script>"
OTHERS = tuple(f"X{number:02}" for number in range(44))


def make_config(**rules: Any) -> Config:
    def rule(name: str, jurisdictions: tuple[str, ...], regions: list[str], **more: Any) -> Any:
        return {
            "name": name,
            "jurisdictions": jurisdictions,
            "artifacts": ["shard", "checkpoint", "model", "metrics"],
            "regions": regions,
            "mechanism": "home",
            "evidence": f"docs/{name}.md",
            "expires": date(2040, 1, 1),
            **more,
        }

    return Config.model_validate(
        {
            "dataset": "places",
            "workload": {"module": "names", "code": "names.py"},
            "regions": {
                name: {
                    "jurisdiction": name.upper(),
                    "store": f"file:.convoy/stores/{name}",
                    "wrapping_key": f"file:.convoy/keys/{name}.key",
                }
                for name in ("eu", "us", "cn")
            },
            "residency": {
                "on_restricted": "exclude",
                "rules": [
                    rule("eu-home", ("EU",), ["eu"], evidence=f"law {HTML}"),
                    rule("us-free", ("US",), ["us", "eu"], mechanism="no restriction"),
                    rule("cn-home", ("CN",), ["cn"]),
                    rule("open", (*OTHERS, "JP"), ["eu"], mechanism="open data", **rules),
                ],
            },
            "ingest": {},
            "shard": {},
            "upload": {},
            "train": {"region": "eu", "steps": 400, "global_batch": 64},
            "evaluate": {"primary": "bits_per_byte"},
            "register": {"model_name": "place-names"},
        }
    )


def make_manifest() -> Manifest:
    shards: list[Shard] = []
    for split, share in (("holdout", 1), ("train", 9)):
        for number, jurisdiction in enumerate(("EU", "US", "CN", "JP", *OTHERS)):
            name = f"{split}-{jurisdiction}-00000.arrow"
            shards.append(
                Shard(
                    name=name,
                    digest=f"{len(shards):064x}",
                    split=split,  # type: ignore[arg-type]
                    jurisdiction=jurisdiction,
                    num_records=share * max(1, 400 - 100 * number),
                    num_bytes=5000,
                )
            )
    return Manifest(dataset="places", shards=tuple(shards))


def write_receipts(root: Path, config: Config, manifest: Manifest) -> None:
    (root / workspace.RECEIPTS).mkdir(parents=True, exist_ok=True)
    residency = config.residency
    for region in config.upload_regions:
        placed, withheld = residency.split_readable(manifest.shards, region.name)
        UploadReceipt(
            region=region.name,
            dataset=manifest.dataset,
            version=manifest.digest,
            placed=tuple(
                PlacedShard(
                    shard=shard.name,
                    digest=shard.digest,
                    address=f"objects/{region.name}{shard.digest[2:]}",
                    num_bytes=5100,
                )
                for shard in placed
            ),
            withheld=withheld,
        ).write(root / workspace.RECEIPTS / f"{region.name}.json")


def write_training(root: Path, config: Config, manifest: Manifest, **changes: Any) -> None:
    readable, excluded = config.residency.split_readable(manifest.of("train"), "eu")
    code = config.workload.model_copy(update={"code": root / "names.py"})
    here = config.model_copy(update={"workload": code})
    counts = {shard.jurisdiction: shard.num_records for shard in readable}
    training = TrainReport(
        fingerprint=digest_training(here, manifest, readable),
        mlflow_run_id="run-one",
        steps=400,
        world_size=2,
        epochs=2.5,
        num_records=counts,
        excluded=excluded,
        final_loss=2.0,
        samples_per_second=1234.5,
        resumed=False,
        incidents=(),
    ).model_copy(update=changes)
    (root / workspace.TRAINED).mkdir(parents=True, exist_ok=True)
    workspace.write_result(root / workspace.TRAINED / "report.json", training)
    lines = [
        {
            "step": step,
            "loss": 2.0 + 40.0 / step,
            "lr": 0.003 * min(1.0, step / 40),
            "grad_norm": 1.0,
            "step_seconds": 0.05,
            "data_wait_seconds": 0.005,
            "samples_per_second": 1200.0 + step % 30,
        }
        for step in range(10, 401, 10)
    ]
    write_steps(root, lines)


def write_steps(root: Path, lines: list[dict[str, float]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / workspace.TRAINED / "steps.jsonl").write_text(text)


def write_evaluation(root: Path, config: Config, manifest: Manifest, **changes: Any) -> None:
    readable, excluded = config.residency.split_readable(manifest.of("holdout"), "eu")
    counts = {shard.jurisdiction: shard.num_records for shard in readable}

    def score(value: float) -> Score:
        return Score(
            model={"bits_per_byte": value, "loss": 0.7 * value},
            baselines={"unigram": {"bits_per_byte": 4.5}, "trigram": {"bits_per_byte": 2.5}},
        )

    metrics = Metrics(
        fingerprint="of-the-run",
        primary="bits_per_byte",
        goal="minimize",
        overall=score(2.0),
        by_jurisdiction={
            name: score(2.0 + 0.1 * number) for number, name in enumerate(sorted(counts))
        },
        num_records=counts,
        excluded=excluded,
    ).model_copy(update=changes)
    (root / workspace.EVALUATED).mkdir(parents=True, exist_ok=True)
    workspace.write_result(root / workspace.EVALUATED / "evaluation.json", metrics)


def write_model_version(root: Path, **changes: Any) -> None:
    version = ModelVersion(
        name="place-names",
        version=7,
        run_id="run-one",
        metric="bits_per_byte",
        value=2.0,
        champion=True,
        previous_champion=6,
        reason="bits_per_byte 2.0000 beats 2.1000 of version 6",
    ).model_copy(update=changes)
    (root / workspace.REGISTERED).mkdir(parents=True, exist_ok=True)
    workspace.write_result(root / workspace.REGISTERED / "model_version.json", version)


def write_workspace(root: Path, config: Config, until: str = "register") -> Manifest:
    """All that the stages up to this one leave, as far as the report reads it."""
    manifest = make_manifest()
    reached = list(STAGES).index(until)
    root.mkdir(exist_ok=True)
    (root / "names.py").write_text("# a workload\n")
    (root / workspace.DATASETS / config.dataset).mkdir(parents=True)
    if reached >= 1:
        (root / workspace.MANIFEST).parent.mkdir(parents=True)
        (root / workspace.MANIFEST).write_bytes(manifest.content)
    if reached >= 2:
        write_receipts(root, config, manifest)
    if reached >= 3:
        write_training(root, config, manifest)
    if reached >= 4:
        write_evaluation(root, config, manifest)
    if reached >= 5:
        write_model_version(root)
    return manifest


@pytest.fixture
def config() -> Config:
    return make_config()


@pytest.fixture
def whole(tmp_path: Path, config: Config) -> Path:
    """A workspace where every stage has run."""
    root = tmp_path / "workspace"
    write_workspace(root, config)
    return root


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a workspace where every stage has run."""
    root = tmp_path_factory.mktemp("whole")
    write_workspace(root, make_config())
    return render_report(make_config(), root, NOW)


def text_of(page: str, name: str) -> str:
    """The text of the element with this id, for elements that hold no other of their kind."""
    found = re.search(rf'<(\w+)[^>]* id="{re.escape(name)}".*?</\1>', page, re.DOTALL)
    assert found, name
    return strip(found[0])


def strip(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def problems_of(page: str) -> dict[str, str]:
    notices = re.findall(r'data-problem="(\w+)">(.*?)</p>', page, re.DOTALL)
    return {stage: strip(text) for stage, text in notices}


def row_of(table: str, first: str) -> list[str]:
    rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
    for row in rows:
        cells = [strip(cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL)]
        if cells[0] == first:
            return cells
    raise AssertionError(f"no row {first}")


def table_of(page: str, name: str) -> str:
    found = re.search(rf'<table id="{name}".*?</table>', page, re.DOTALL)
    assert found, name
    return found[0]


def test_key_numbers(page: str) -> None:
    # 400, 300, 200, 100 and 44 times 1 records held out; nine times as many to train on.
    assert text_of(page, "key-records") == "10,440"
    assert text_of(page, "key-used") == f"{9 * (400 + 300 + 100 + 44):,}"
    assert text_of(page, "key-excluded") == "2,000"
    assert text_of(page, "key-steps") == "400"
    assert text_of(page, "key-throughput") == "1,234"
    assert text_of(page, "key-metric") == "2.000"
    assert "20.0 % better than trigram with 2.500; lower is better" in strip(page)
    assert problems_of(page) == {}


def test_every_shard_has_its_place_and_reason(page: str) -> None:
    matrix = table_of(page, "matrix")
    free = "3,000 2 shards, us-free"
    assert row_of(matrix, "US") == ["US", "2", "2,700", "300", free, free, "refused no rule"]
    assert row_of(matrix, "CN")[4:] == [
        *["refused no rule"] * 2,
        "2,000 2 shards, cn-home",
    ]
    rules = table_of(page, "rules")
    assert row_of(rules, "us-free") == [
        *("us-free", "US", "us, eu", "no restriction", "docs/us-free.md", "2040-01-01"),
        *("2", "3,000"),
    ]
    assert row_of(rules, "open")[1].startswith("45 jurisdictions JP, X00, X01")
    for shard in make_manifest().shards:
        assert page.count(shard.name) == (2 if shard.jurisdiction == "US" else 1)
    assert f"objects/eu{make_manifest().shards[0].digest[2:]}" in page


def test_exclusions_say_of_whom_how_many_and_why(page: str) -> None:
    section = page[page.index('<section id="excluded"') : page.index('<section id="training"')]
    assert row_of(section, "CN") == ["CN", "1,800", "200", "no rule lets shard of CN be in eu"]
    assert row_of(section, "Together") == ["Together", "1,800", "200", "19.2 % of all records"]


def test_no_exclusion_is_said(whole: Path, config: Config) -> None:
    write_training(whole, config, make_manifest(), excluded=())
    write_evaluation(whole, config, make_manifest(), excluded=())
    assert "Nothing: eu may read every record" in render_report(config, whole, NOW)


def test_metrics_whole_and_by_jurisdiction(page: str) -> None:
    overall = table_of(page, "overall")
    assert row_of(overall, "Scored") == ["Scored", "bits_per_byte", "loss"]
    assert row_of(overall, "model") == ["model", "2.000", "1.400"]
    assert row_of(overall, "trigram baseline") == ["trigram baseline", "2.500", "–"]
    by = table_of(page, "by-jurisdiction")
    assert row_of(by, "EU") == ["EU", "400", "2.000", "2.500", "4.500", "20.0 % better", "1.400"]
    assert row_of(by, "X43")[2:6] == ["6.600", "2.500", "4.500", "164.0 % worse"]


def test_lineage(page: str, config: Config) -> None:
    lineage = text_of(page, "lineage")
    for value in (
        make_manifest().digest,
        digest_config(config),
        config.residency.digest,
        "run-one",
        "models:/place-names/7",
        "Yes, because bits_per_byte 2.0000 beats 2.1000 of version 6",
        "the champion before was version 6",
    ):
        assert value in lineage


def test_incidents_and_a_resumed_run(whole: Path, config: Config) -> None:
    incident = Incident(
        cause="killed",
        rank=1,
        node=0,
        message=f"rank 1 {HTML}",
        last_step=130,
        steps_lost=30,
        seconds=12.34,
        seconds_lost=4.56,
    )
    stretches = (
        Stretch(kind="starting", begins=0.0, ends=2.0),
        Stretch(kind="training", begins=2.0, ends=15.0, first_step=1, last_step=130, lost_steps=30),
        Stretch(kind="recovering", begins=15.0, ends=19.6),
    )
    goodput = measure_goodput(stretches, [])
    write_training(
        whole,
        config,
        make_manifest(),
        incidents=(incident,),
        resumed=True,
        stretches=stretches,
        goodput=goodput,
    )
    page = render_report(config, whole, NOW)
    assert row_of(page, "killed") == ["killed", "1", "0", "130", "30", "4.6", f"rank 1 {HTML}"]
    assert "Of 19.6 s, 51 % moved the training on: training 10.0 s" in page
    assert "starting, ending 2.0 s, training 10.0 s, lost 3.0 s, recovering 4.6 s" in page
    assert "went on from a checkpoint" in page
    assert page.count("stroke: var(--warn)") == 3  # one dashed line in each curve


@pytest.mark.parametrize("reached", range(-1, 6))
def test_a_missing_stage_is_said_with_its_command(
    tmp_path: Path, config: Config, reached: int
) -> None:
    if reached >= 0:
        write_workspace(tmp_path, config, list(STAGES)[reached])
    page = render_report(config, tmp_path, NOW)
    missing = list(STAGES)[reached + 1 :]
    problems = problems_of(page)
    assert list(problems) == missing
    for stage in missing:
        assert f"convoy stage {stage}" in problems[stage]
        assert f"{stage}: missing" in page
    assert str(tmp_path) not in page


def test_results_of_other_inputs_are_said(whole: Path, config: Config) -> None:
    (whole / "names.py").write_text("# another workload\n")
    write_model_version(whole, run_id="run-zero")
    evaluation = json.loads((whole / workspace.EVALUATED / "evaluation.json").read_text())
    evaluation["num_records"]["EU"] += 1
    (whole / workspace.EVALUATED / "evaluation.json").write_text(json.dumps(evaluation))
    receipt = json.loads((whole / workspace.RECEIPTS / "us.json").read_text())
    (whole / workspace.RECEIPTS / "us.json").write_bytes(
        rfc8785.dumps(receipt | {"version": "0" * 64})
    )
    problems = read_findings(config, whole).problems
    assert "of other data, code, rules or parameters" in problems["train"]
    assert "another version of the dataset" in problems["evaluate"]
    assert "of an earlier training" in problems["register"]
    assert "us.json is of version 000000000000" in problems["upload"]
    page = render_report(config, whole, NOW)
    assert problems_of(page).keys() == problems.keys()
    assert row_of(page, "us")[2] == "no receipt"
    assert row_of(table_of(page, "matrix"), "US")[5] == "not placed allowed by us-free"


def test_an_earlier_evaluation_was_registered(whole: Path, config: Config) -> None:
    write_model_version(whole, value=1.5)
    assert "of an earlier evaluation" in read_findings(config, whole).problems["register"]


def test_an_expired_rule_is_a_conflict(whole: Path) -> None:
    config = make_config(expires=date(2030, 4, 30))
    page = render_report(config, whole, NOW)
    cell = row_of(table_of(page, "matrix"), "JP")[4]
    assert cell == "1,000 not allowed 2 shards, rule 'open' expired on 2030-04-30"
    assert row_of(table_of(page, "rules"), "open")[5] == "expired 2030-04-30"
    assert "Shards of 45 jurisdictions lie in a region where no rule" in strip(page)


def test_a_region_of_earlier_parameters_is_still_shown(whole: Path, config: Config) -> None:
    regions = {name: region for name, region in config.regions.items() if name != "cn"}
    rules = tuple(rule for rule in config.residency.rules if rule.name != "cn-home")
    residency = config.residency.model_copy(update={"rules": rules})
    fewer = config.model_copy(update={"regions": regions, "residency": residency})
    page = render_report(fewer, whole, NOW)
    assert row_of(page, "cn")[1:5] == ["not in params.yaml", "2", "2,000", "10.0 KiB"]
    assert row_of(table_of(page, "matrix"), "CN")[6].startswith("2,000 not allowed")


@pytest.mark.parametrize(
    "path",
    [
        workspace.MANIFEST,
        workspace.RECEIPTS / "eu.json",
        workspace.TRAINED / "report.json",
        workspace.TRAINED / "steps.jsonl",
        workspace.EVALUATED / "evaluation.json",
        workspace.REGISTERED / "model_version.json",
    ],
)
def test_a_broken_file_is_named(whole: Path, config: Config, path: Path) -> None:
    (whole / path).write_text("{")
    stage = path.parent.name
    problem = read_findings(config, whole).problems[stage]
    assert problem.startswith(str(path))
    assert f"convoy stage {stage}" in problem


def test_a_lost_code_file_is_said(whole: Path, config: Config) -> None:
    (whole / "names.py").unlink()
    problems = read_findings(config, whole).problems
    assert problems == {"train": "params.yaml: workload.code: there is no names.py"}


def test_text_of_users_is_escaped(whole: Path, config: Config) -> None:
    manifest = make_manifest()
    exclusion = Exclusion(jurisdiction="CN", num_shards=1, num_records=1, reason=HTML)
    write_training(whole, config, manifest, excluded=(exclusion,))
    metrics = json.loads((whole / workspace.EVALUATED / "evaluation.json").read_text())
    metrics["overall"]["model"][HTML] = 1.0
    metrics["overall"]["baselines"][HTML] = {HTML: 1.0}
    (whole / workspace.EVALUATED / "evaluation.json").write_text(json.dumps(metrics))
    write_model_version(whole, reason=HTML)
    page = render_report(config, whole, NOW)
    assert HTML not in page
    assert page.count("&lt;script&gt;") >= 6


def test_a_diverged_run_is_shown(whole: Path, config: Config) -> None:
    nan = float("nan")
    write_training(whole, config, make_manifest(), final_loss=nan)
    line = {"lr": 0.1, "step_seconds": 0.1, "data_wait_seconds": 0.0, "samples_per_second": 10.0}
    write_steps(whole, [{"step": step, "loss": nan, **line} for step in (10, 20)])
    assert "No number in 2 logged steps." in render_report(config, whole, NOW)


def test_the_page_is_a_function_of_the_workspace(
    whole: Path, config: Config, tmp_path: Path
) -> None:
    copy = shutil.copytree(whole, tmp_path / "copy")
    assert render_report(config, whole, NOW) == render_report(config, copy, NOW)


def test_the_curves_take_the_page_s_colours(page: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3
    for drawing, unit in zip(drawings, ("loss", "learning rate", "samples/s"), strict=True):
        assert "stroke: var(--curve)" in drawing
        assert not re.search(r"#[0-9a-f]{6}\b", drawing)
        assert f">{unit}" in drawing
        assert ">step<" in drawing
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert "6 at step 10, 2.1 at step 400; between 2.1 and 6." in page
    assert "The median step took 50 ms; 10.0 % of the time went into waiting for data." in page


def write_split(root: Path) -> None:
    """Rank 1 computes twice as long; rank 0 waits for it."""
    names = ("data_wait", "forward", "backward", "communication", "optimizer")
    of_rank = {0: (0.0, 0.01, 0.02, 0.03, 0.001), 1: (0.0, 0.02, 0.04, 0.0, 0.001)}
    for rank, seconds in of_rank.items():
        split = {f"{name}_seconds": each for name, each in zip(names, seconds, strict=True)}
        lines = [{"step": step, "rank": rank, "peak_rss_bytes": 2**30, **split} for step in (5, 10)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / workspace.TRAINED / f"steps-{rank}.jsonl").write_text(text)
    common = {"loss": 1.0, "lr": 0.1, "step_seconds": 0.061, "samples_per_second": 10.0}
    write_steps(root, [{**common, **split, "step": step} for step in (5, 10)])


def test_where_a_step_goes(whole: Path, config: Config) -> None:
    write_split(whole)
    page = render_report(config, whole, NOW)
    assert "Rank 1 is the slowest: it works 61 ms a step" in page
    cells = ["31", "0", "10", "20", "30", "1", "0", "0", "1.0 GiB"]
    assert row_of(table_of(page, "ranks"), "0")[1:] == cells
    assert row_of(table_of(page, "ranks"), "1 (slowest)")[1] == "61"
    assert "The largest part is backward, 66 %." in page
    [drawing] = re.findall(r"<svg[^>]*ms a step.*?</svg>", page, re.DOTALL)
    assert "fill: var(--part-3)" in drawing
    assert ">exposed communication<" in drawing
    assert not re.search(r"#[0-9a-f]{6}\b", drawing)


def test_a_broken_log_of_a_rank_is_named(whole: Path, config: Config) -> None:
    write_split(whole)
    (whole / workspace.TRAINED / "steps-1.jsonl").write_text("{")
    problem = read_findings(config, whole).problems["train"]
    assert problem.startswith("artifacts/train/steps-1.jsonl is not a log of steps")


def test_nothing_is_loaded(page: str) -> None:
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|@import|<link[^>]*stylesheet|src=", page)


def test_it_is_written_where_it_is_asked_for(tmp_path: Path, config: Config) -> None:
    root = tmp_path / "workspace"
    write_workspace(root, config, until="shard")
    assert write_report(config, root) == root / workspace.REPORT
    output = write_report(config, root, tmp_path / "deep" / "page.html")
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert os.listdir(output.parent) == ["page.html"]


def test_it_cannot_be_written(tmp_path: Path, config: Config) -> None:
    write_workspace(tmp_path, config, until="shard")
    with pytest.raises(WorkspaceError, match="could not be written"):
        write_report(config, tmp_path, tmp_path / "names.py" / "page.html")
    with pytest.raises(WorkspaceError, match="could not be written"):
        write_report(config, tmp_path, tmp_path / "artifacts")
    assert not list(tmp_path.glob(".*.new"))


def test_compare() -> None:
    score = Score(
        model={"accuracy": 0.9, "loss": 0.5},
        baselines={"a": {"accuracy": 0.6}, "b": {"accuracy": 0.75}, "zero": {"loss": 0.0}},
    )
    best = compare(score, "accuracy", "maximize")
    assert best is not None
    assert (best.baseline, best.baseline_value, round(best.gain, 9)) == ("b", 0.75, 0.2)
    worst = compare(score, "accuracy", "minimize")
    assert worst is not None
    assert (worst.baseline, round(worst.gain, 9)) == ("a", -0.5)
    assert compare(score, "loss", "minimize") is None
    assert compare(score, "perplexity", "minimize") is None


def test_formats() -> None:
    assert [format_size(n) for n in (0, 1023, 1024, 5 * 2**40, 2**60)] == [
        *("0 B", "1023 B", "1.0 KiB", "5.0 TiB", "1048576.0 TiB"),
    ]
    assert [format_metric(x) for x in (2.0, 0.00012345, 1234.56, 123456.7)] == [
        *("2.000", "0.0001234", "1235", "123,457"),
    ]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update"),
        *("--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'chromium'}"),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.skipif(
    not shutil.which("chromium") and "CI" not in os.environ, reason="chromium is not installed"
)
def test_in_a_browser(whole: Path, config: Config, browser: Any) -> None:
    path = write_report(config, whole)
    browser.get(path.as_uri())
    assert browser.title == "places: report of the last run"

    def find(selector: str) -> list[Any]:
        return list(browser.find_elements("css selector", selector))

    assert [element.text for element in find("h2")] == [
        "Where every shard lives, and why",
        "What was excluded",
        "Training",
        "Metrics on held-out records",
        "Lineage",
    ]
    assert all(figure.size["height"] > 100 for figure in find("figure svg"))

    def visible(table: str) -> list[str]:
        script = """return [...document.querySelectorAll(arguments[0])]
            .filter((cell) => cell.getClientRects().length).map((cell) => cell.textContent)"""
        return list(browser.execute_script(script, f"{table} > tbody > tr > th"))

    assert len(visible("#matrix")) == 12
    (more,) = find("#places .more")
    assert more.text == "Show all 48"
    more.click()
    assert len(visible("#matrix")) == 48
    find("#by-jurisdiction th[data-column='5'] button")[0].click()
    assert visible("#by-jurisdiction")[0] == "X43"  # the worst against its best baseline
    find("#by-jurisdiction th[data-column='5'] button")[0].click()
    assert visible("#by-jurisdiction")[0] == "EU"

    # No table is wider than its own scrolling frame, so the page never scrolls sideways.
    browser.set_window_size(420, 900)
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= window.innerWidth"
    )
    entries = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [e["params"] for e in entries if e["method"] == "Network.requestWillBeSent"]
    # Chromium's own start page asks for things too.
    urls = {each["request"]["url"] for each in sent if each["documentURL"] == path.as_uri()}
    assert urls - {"data:,"} == {path.as_uri()}
    assert browser.get_log("browser") == []
