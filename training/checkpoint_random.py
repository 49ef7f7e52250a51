"""The random state of a rank: torch's, CUDA's, NumPy's and Python's."""

import hashlib
import random
from collections.abc import Callable
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


def begin_generators(seed: int, step: int, reseed: Callable[[int], object]) -> None:
    """Begin anew at a step, the same way each time.

    `reseed` seeds torch's generator as the start of a training does, with other draws for ranks
    that must draw for themselves.
    """
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    reseed(int.from_bytes(digest[:4]))
    follow_torch()


def follow_torch() -> None:
    """Seed NumPy's and Python's generators by what torch's was seeded with."""
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed())
