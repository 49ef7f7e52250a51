"""The random state of a rank: torch's, CUDA's, NumPy's and Python's."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def read_generators() -> dict[str, Any]:
    """The state of every generator that a model or a workload may draw from."""
    kind, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: dict[str, Any]) -> None:
    """Draw on from there."""
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_generators(seed: int, step: int, stream: int) -> None:
    """Begin anew: the same draws for the same three numbers, others for any others."""
    digest = hashlib.sha256(f"{seed}/{step}/{stream}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7]))
    np.random.seed(int.from_bytes(digest[8:12]))
    random.seed(digest[12:])
