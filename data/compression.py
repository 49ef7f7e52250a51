"""Raw input files that are compressed, by the end of their names: gz, bz2, xz and zst."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast


def find_compression(path: Path) -> str | None:
    """The end of the file's name if it is that of a compression: `.gz`, `.bz2`, `.xz`, `.zst`."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


def open_source(path: Path) -> IO[bytes]:
    """Open a file to read its bytes, decompressed as its name says."""
    compression = find_compression(path)
    return COMPRESSIONS[compression](path) if compression else path.open("rb")


def _open_gz(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb"))


def _open_bz2(path: Path) -> IO[bytes]:
    return bz2.open(path, "rb")


def _open_xz(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb")


def _open_zst(path: Path) -> IO[bytes]:
    """By Arrow: Python 3.11 has no zstd."""
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": _open_gz,
    ".bz2": _open_bz2,
    ".xz": _open_xz,
    ".zst": _open_zst,
}
CUT_OR_DAMAGED = (EOFError, lzma.LZMAError, zlib.error)
"""What reading raises, beside OSError, from a file that is not whole."""
