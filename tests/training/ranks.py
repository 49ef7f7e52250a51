"""Ranks of a process group as processes forked from one that has imported torch: no torchrun."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

_PRELOADED = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
]


class RankFailed(Exception):
    """What one rank raised first, with its traceback."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 240
) -> list[Any]:
    """Call `function(*arguments)`, of a module, in every rank of a gloo group; what each gave.

    Raises RankFailed with the first error, TimeoutError when a rank has not ended in time; no
    process is left in either case.
    """
    context = _context()
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(rank, world_size, f"{directory}/rendezvous", sender, function, arguments),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], timeout_seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _collect(receivers: list[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        pending = [r for number, r in enumerate(receivers) if number not in results]
        ready = wait(pending, timeout_seconds)
        if not ready:
            missing = [n for n in range(len(receivers)) if n not in results]
            raise TimeoutError(f"ranks {missing} have not ended in {timeout_seconds:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            number = receivers.index(receiver)
            try:
                failed, result = receiver.recv()
            except EOFError:
                raise RankFailed(f"rank {number} died without a word") from None
            if failed:
                raise RankFailed(f"rank {number}:\n{result}")
            results[number] = result
    return [results[number] for number in range(len(receivers))]


def _context() -> ForkServerContext:
    # Forked from a process with more than one intra-op thread, torch hangs.
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _rank(
    rank: int,
    world_size: int,
    rendezvous: str,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        answer = (False, function(*arguments))
    except BaseException:
        answer = (True, traceback.format_exc())
    sender.send(answer)
    sender.close()
    if dist.is_initialized() and not answer[0]:
        dist.destroy_process_group()
