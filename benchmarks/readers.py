"""The same records in the formats of LitData, MosaicML Streaming and WebDataset, and their readers.

Each is set up as its documentation advises for local data that is read as often as here:
LitData with its TokensLoader for token blocks and with JSON bytes for records; MosaicML with typed
columns and `predownload` of a whole epoch, without which it takes a file lock for each sample;
WebDataset with the shuffle buffer of its examples. None of them verifies or decrypts anything.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from benchmarks.peers import load_streaming
from benchmarks.samples import BLOCK_TOKENS

Rows = Sequence[dict[str, Any]]

_CHUNK_BYTES = 64 << 20
_SAMPLES_A_SHARD = 4096
_COLUMNS = {"path": "str", "start": "int", "text": "str"}


def write_litdata(rows: Rows, directory: Path, *, is_tokens: bool) -> None:
    import torch
    from litdata.streaming.item_loader import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    directory.mkdir()
    loader = TokensLoader(block_size=BLOCK_TOKENS) if is_tokens else None
    chunk = {"chunk_size": _CHUNK_BYTES // 2} if is_tokens else {"chunk_bytes": _CHUNK_BYTES}
    writer = BinaryWriter(str(directory), item_loader=loader, **chunk)
    for number, row in enumerate(rows):
        writer[number] = torch.from_numpy(row["tokens"]) if is_tokens else json.dumps(row).encode()
    writer.done()
    writer.merge()


def read_litdata(directory: Path, count: int, *, is_tokens: bool) -> Any:
    from litdata import StreamingDataset
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(block_size=BLOCK_TOKENS) if is_tokens else None
    return StreamingDataset(str(directory), item_loader=loader, shuffle=True, drop_last=False)


def write_mosaic(rows: Rows, directory: Path, *, is_tokens: bool) -> None:
    columns = {"tokens": f"ndarray:uint16:{BLOCK_TOKENS}"} if is_tokens else _COLUMNS
    with load_streaming().MDSWriter(out=str(directory), columns=columns) as writer:
        for row in rows:
            writer.write(row)


def read_mosaic(directory: Path, count: int, *, is_tokens: bool) -> Any:
    streaming = load_streaming()
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(
        local=str(directory), shuffle=True, batch_size=32, predownload=count, shuffle_seed=1
    )


def write_webdataset(rows: Rows, directory: Path, *, is_tokens: bool) -> None:
    import webdataset

    directory.mkdir()
    pattern = f"{directory}/%05d.tar"
    with webdataset.ShardWriter(pattern, maxcount=_SAMPLES_A_SHARD, verbose=0) as writer:
        for number, row in enumerate(rows):
            sample = (
                {"bin": row["tokens"].tobytes()} if is_tokens else {"bin": json.dumps(row).encode()}
            )
            writer.write({"__key__": f"{number:08d}"} | sample)


def read_webdataset(directory: Path, count: int, *, is_tokens: bool) -> Any:
    import webdataset

    urls = sorted(map(str, directory.glob("*.tar")))
    return webdataset.WebDataset(urls, shardshuffle=len(urls), seed=1).shuffle(1000)


def finish_tokens(peer: str, sample: Any) -> Any:
    """A peer's token block as what all readers give: a tensor of 64-bit integers."""
    import torch

    if peer == "LitData":
        return sample.to(torch.int64)
    found = sample["tokens"] if peer == "MosaicML" else np.frombuffer(sample["bin"], np.uint16)
    return torch.from_numpy(found.astype(np.int64))


def finish_document(peer: str, sample: Any) -> dict[str, Any]:
    """A peer's record as what all readers give: a mapping of its fields."""
    if peer == "MosaicML":
        document: dict[str, Any] = sample
        return document
    parsed: dict[str, Any] = orjson.loads(sample if peer == "LitData" else sample["bin"])
    return parsed


Write = Callable[..., None]
Read = Callable[..., Any]

PEERS: dict[str, tuple[Write, Read]] = {
    "LitData": (write_litdata, read_litdata),
    "MosaicML": (write_mosaic, read_mosaic),
    "WebDataset": (write_webdataset, read_webdataset),
}
