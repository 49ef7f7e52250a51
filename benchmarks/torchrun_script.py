"""The bare script of the benchmark of recovery: DDP, a checkpoint every 20 steps, a beat a step."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.heartbeat import Heartbeat


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = directory / "checkpoint.pt"
    step = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    heartbeat = Heartbeat(directory, dist.get_rank())
    while True:
        step += 1
        heartbeat.begin_step(step)
        inputs = torch.rand(16, 2)
        loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 1).long())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 0:
            if dist.get_rank() == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, saved.with_suffix(".tmp"))
                saved.with_suffix(".tmp").rename(saved)
            dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
