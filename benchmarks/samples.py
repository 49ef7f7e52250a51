"""Records for benchmarks, made of the Python sources of the interpreter's own library."""

import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_TOKENS = 1024
TEXT_CHARACTERS = 2400


def token_blocks(num_bytes: int) -> list[dict[str, Any]]:
    """Blocks of BLOCK_TOKENS word numbers (uint16); about so many bytes of them."""
    words: list[str] = []
    for _, text in _sources():
        words += re.findall(r"\w+|\s+|[^\w\s]", text)
        if 2 * len(words) >= num_bytes:
            break
    ranks = {word: i for i, (word, _) in enumerate(Counter(words).most_common(2**16 - 1))}
    tokens = np.array([ranks.get(word, 2**16 - 1) for word in words], np.uint16)
    num_blocks = num_bytes // (2 * BLOCK_TOKENS)
    blocks = np.resize(tokens, num_blocks * BLOCK_TOKENS).reshape(-1, BLOCK_TOKENS)
    return [{"tokens": block} for block in blocks]


def text_records(num_bytes: int) -> list[dict[str, Any]]:
    """Pieces of TEXT_CHARACTERS of source code with where they stand; about so many bytes."""
    records: list[dict[str, Any]] = []
    while len(records) * TEXT_CHARACTERS < num_bytes:
        for name, text in _sources():
            for start in range(0, len(text) - TEXT_CHARACTERS, TEXT_CHARACTERS):
                piece = text[start : start + TEXT_CHARACTERS]
                records.append({"path": name, "start": start, "text": piece})
    return records[: num_bytes // TEXT_CHARACTERS]


def _sources() -> list[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    return [
        (path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace"))
        for path in paths
    ]
