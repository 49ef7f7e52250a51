"""Loops that take turns, each in processes of its own, a rank each."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

Steps = Callable[[int], None]
"""Takes so many more steps."""
Builder = Callable[[Path], Steps]
"""Called in each rank, of a function of a module, with a directory for all of them."""

_WARM_UP = 2
"""Blocks."""


def take_turns(
    builders: Mapping[str, Builder], world_size: int, rounds: int, block_steps: int
) -> dict[str, list[float]]:
    """Of each loop, the seconds a step of every block, of the rank that took longest.

    In each round every loop takes a block of steps, in an order that changes from round to round.
    A rank has one thread, the environment that torchrun gives it, and a gloo process group.
    """
    context = multiprocessing.get_context("spawn")
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as scratch:
        ranks: dict[str, list[Connection]] = {}
        processes = []
        for name, build in builders.items():
            directory = Path(scratch) / name
            directory.mkdir()
            pipes = [context.Pipe() for _ in range(world_size)]
            for number, (_, far) in enumerate(pipes):
                arguments = (number, world_size, build, directory, block_steps, far)
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                processes[-1].start()
                far.close()
            ranks[name] = [near for near, _ in pipes]
        for near in (near for nears in ranks.values() for near in nears):
            near.recv()  # it has warmed up
        names = list(builders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                for near in ranks[name]:
                    near.send(True)
                seconds[name].append(max(near.recv() for near in ranks[name]))
        for near in (near for nears in ranks.values() for near in nears):
            near.send(False)
        for process in processes:
            process.join()
    return seconds


def _rank(
    number: int,
    world_size: int,
    build: Builder,
    directory: Path,
    block_steps: int,
    turns: Connection,
) -> None:
    if world_size > 1:  # as torchrun sets them: Fabric and Accelerate look
        os.environ |= {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "GROUP_RANK": "0",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_RUN_ID": "benchmark",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=number, world_size=world_size
    )
    take = build(directory)
    take(_WARM_UP * block_steps)
    turns.send(0.0)
    while turns.recv():
        started = perf_counter()
        take(block_steps)
        turns.send((perf_counter() - started) / block_steps)
    dist.destroy_process_group()
