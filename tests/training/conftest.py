"""Prepared workspaces, and a process group of one in this process: no torchrun is started."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import uploaded, work

__all__ = ["one_rank", "uploaded", "work"]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
