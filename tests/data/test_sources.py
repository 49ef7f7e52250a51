"""Raw input files: folders, compressed files, and what is wrong named by file, line and field."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources import SourceError, find_format, read_rows, read_source

LINES = "".join(json.dumps({"n": i, "text": f"geheim {i}"}) + "\n" for i in range(3000)).encode()
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: bytes(pa.compress(content, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_are_read_by_their_names(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES))
    assert find_format(path) == "jsonl"
    assert list(read_source(path)) == list(read_source(tmp_path / "a.jsonl"))
    table = tmp_path / f"b.tsv{suffix.upper()}"
    table.write_bytes(COMPRESS[suffix](b"a\tb\n1\tx,y\n"))
    assert list(read_source(table)) == [{"a": "1", "b": "x,y"}]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_cut_or_damaged_file_is_refused(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](LINES)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0x10
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (whole[: len(whole) // 2], whole[:-3], b"no " + whole[3:]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"a\.jsonl\.\w+:\d+: it is no whole") as refused:
            list(read_rows(path))
        assert "geheim" not in str(refused.value)
    path.write_bytes(damaged)
    with pytest.raises(SourceError, match=r"a\.jsonl") as refused:
        list(read_rows(path))
    assert "geheim" not in str(refused.value)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "1.jsonl.gz").write_bytes(gzip.compress(b'{"n": 2}\n'))
    (tmp_path / "a.csv").write_bytes(b"n\n1\n")
    (tmp_path / "c.txt").write_bytes(b"three\n")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert list(read_source(tmp_path)) == [{"n": "1"}, {"n": 2}, {"text": "three"}]


def write_parquet(path: Path, **columns: Any) -> None:
    pq.write_table(pa.table(columns), path)


def test_parquet_files_of_a_folder_have_the_same_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", n=[1], text=["geheim"])
    write_parquet(tmp_path / "2.parquet", n=[2], text=["geheim"])
    assert len(list(read_rows(tmp_path))) == 2
    write_parquet(tmp_path / "2.parquet", n=["geheim"], text=["geheim"])
    with pytest.raises(SourceError, match=r"2\.parquet: field 'n' is string, but int64 in .*1\.p"):
        list(read_rows(tmp_path))
    write_parquet(tmp_path / "2.parquet", n=[2])
    with pytest.raises(SourceError, match=r"2\.parquet: field 'text' is not there, but string"):
        list(read_rows(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n3,geheim,5\n", r"a\.csv:3: 3 fields, but the header names 2"),
        ("a.jsonl", b'{"a": 1}\n\xff geheim\n', r"a\.jsonl:2: byte 1 of the line is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: .* too deep"),
        ("a.jsonl", b'{"n": ' + b"1" * 5000 + b"}", r"a\.jsonl:1: a number has too many digits"),
        (
            "a.txt.gz",
            gzip.compress(b"one\n\xc3(geheim\n", mtime=0),
            r"a\.txt\.gz:2: byte 1 of the line",
        ),
        ("a.parquet", b"PAR1geheim", r"a\.parquet: row 1: parquet cannot be read"),
        ("a.parquet.gz", b"geheim", r"parquet is compressed within"),
        ("a.csv", b"", r"a\.csv holds no record"),
        ("a.csv", b"a,b\n", r"a\.csv holds no record"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), r"a\.jsonl\.gz holds no record"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz"),
        ("a.rar.gz", b"geheim", r"files ending in '\.rar' are not read"),
    ],
)
def test_bad_files_are_named_and_never_quoted(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_bytes(content)
    for source in (tmp_path / "folder", tmp_path / "folder" / name):
        with pytest.raises(SourceError, match=message) as refused:
            list(read_rows(source))
        assert "geheim" not in str(refused.value)
