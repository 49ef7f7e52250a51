"""Records to sealed, placed shards in a local store: raw MB per CPU-second.

Ours is all that `convoy stage shard` and `convoy stage upload` do with records that are in memory:
columns, zstd level 1, SHA-256, the file, then seal, put, sync and log. The references, on the same
records in the same run, alternating, and never counting the start of a process:

- zstd: the slowest part of ours alone, Arrow writing the finished columns with zstd level 1;
- LitData `optimize` with its Fernet encryption of whole chunks (which is faster than of samples),
  one worker, no compression; the cost of an `optimize` of one record is taken off;
- MosaicML `MDSWriter` with zstd level 1 and xxh64, and no encryption.

Nothing is held out, for the peers do not know that; what holding out costs is the last row.
"""

import contextlib
import io
import os
import resource
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers import load_streaming
from benchmarks.samples import BLOCK_TOKENS, text_records, token_blocks
from benchmarks.table import Row, publish
from data.manifest import Manifest
from data.record import Record
from data.sharding import ShardConfig, write_shards
from data.upload import upload_region
from storage.access_log import AccessLog
from storage.region import Region
from tests.residency import EU_AT_HOME

REPETITIONS = 3
RAW_BYTES = 64 << 20
CHUNK_BYTES = 32 << 20
MDS_COLUMNS = {
    "tokens": {"tokens": f"ndarray:uint16:{BLOCK_TOKENS}"},
    "text": {"path": "str", "start": "int", "text": "str"},
}

Rows = list[dict[str, Any]]


def main() -> None:
    os.environ["DISABLE_TELEMETRY"] = "1"
    rows: list[Row] = []
    for kind, samples in (("tokens", token_blocks(RAW_BYTES)), ("text", text_records(RAW_BYTES))):
        measured = _measure(kind, samples)
        ours = measured["ours"]
        rows += [
            _row(f"{kind}, zstd alone", ours, measured["zstd"], 0.85),
            _row(f"{kind}, LitData with Fernet", ours, measured["litdata"], 2.0),
            _row(f"{kind}, MDSWriter, no encryption", ours, measured["mds"], 1.5),
            _row(f"{kind}, a tenth held out against none", measured["holdout"], ours, None),
        ]
    publish("write", "MB per CPU s", rows)


def _row(case: str, ours: float, reference: float, target: float | None) -> Row:
    ratio = ours / reference
    return Row(
        case=case,
        ours=ours,
        reference=reference,
        ratio=ratio,
        target=f"at least {target} times" if target else "none",
        holds=target is None or ratio >= target,
    )


def _measure(kind: str, samples: Rows) -> dict[str, float]:
    """Medians, in MB per CPU-second."""
    records = [Record(fields, "EU") for fields in samples]
    raw = sum(_size(value) for fields in samples for value in fields.values())
    streaming = load_streaming()
    systems: dict[str, Callable[[Path], object]] = {
        "ours": lambda path: write_ours(records, path, holdout=0.0),
        "zstd": prepare_zstd(samples),
        "litdata": lambda path: write_litdata(samples, path),
        "litdata_start": lambda path: write_litdata(samples[:1], path),
        "mds": lambda path: write_mds(streaming, kind, samples, path),
        "holdout": lambda path: write_ours(records, path, holdout=0.1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for repetition in range(REPETITIONS + 1):
        for name, write in systems.items():
            with tempfile.TemporaryDirectory() as path:
                begun = _cpu_seconds()
                write(Path(path))
                if repetition:  # the first one warms up
                    seconds[name].append(_cpu_seconds() - begun)
    spent = {name: median(times) for name, times in seconds.items()}
    spent["litdata"] -= spent.pop("litdata_start")
    return {name: raw / 1e6 / value for name, value in spent.items()}


def _size(value: Any) -> int:
    return len(value.encode()) if isinstance(value, str) else getattr(value, "nbytes", 8)


def _cpu_seconds() -> float:
    """Of this process, all its threads, and of the processes that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def write_ours(records: Sequence[Record], path: Path, holdout: float) -> None:
    (path / "shards").mkdir()
    config = ShardConfig(records_per_shard=1 << 20, bytes_per_shard=CHUNK_BYTES, holdout=holdout)
    shards = write_shards(records, path / "shards", config)
    region = Region(
        name="eu",
        jurisdiction="EU",
        store=f"file:{path}/store",
        wrapping_key=f"file:{path}/eu.key",
    )
    manifest = Manifest(dataset="benchmark", shards=shards)
    log = AccessLog(path / "access.log")
    receipt = upload_region(manifest, path / "shards", region, EU_AT_HOME, log)
    log.close()
    assert len(receipt.placed) == len(shards)


def prepare_zstd(samples: Rows) -> Callable[[Path], None]:
    """Write finished columns through Arrow with zstd level 1, in files like ours."""
    import pyarrow as pa

    from data.columns import build_column

    built = [build_column(name, [row[name] for row in samples]) for name in sorted(samples[0])]
    schema = pa.schema([field for field, _ in built])
    table = pa.table([column for _, column in built], schema=schema)
    codec = pa.Codec("zstd", compression_level=1)
    per_file = max(1, len(samples) * CHUNK_BYTES // table.nbytes)

    def write(path: Path) -> None:
        for start in range(0, len(samples), per_file):
            options = pa.ipc.IpcWriteOptions(compression=codec)
            with pa.ipc.new_file(pa.BufferOutputStream(), schema, options=options) as writer:
                writer.write_table(table.slice(start, per_file))

    return write


class _Fetch:
    """What LitData calls for each input; a fork shares the samples."""

    def __init__(self, samples: Rows) -> None:
        self.samples = samples

    def __call__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def write_litdata(samples: Rows, path: Path) -> None:
    import litdata
    from litdata.utilities.encryption import FernetEncryption

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        litdata.optimize(
            fn=_Fetch(samples),
            inputs=list(range(len(samples))),
            output_dir=str(path / "litdata"),
            chunk_bytes=CHUNK_BYTES,
            encryption=FernetEncryption("password", level="chunk"),
            num_workers=1,
            start_method="fork",
            verbose=False,
        )


def write_mds(streaming: Any, kind: str, samples: Rows, path: Path) -> None:
    with streaming.MDSWriter(
        out=str(path / "mds"),
        columns=MDS_COLUMNS[kind],
        compression="zstd:1",
        hashes=["xxh64"],
        size_limit=CHUNK_BYTES,
    ) as writer:
        for sample in samples:
            writer.write(sample)


if __name__ == "__main__":
    main()
