"""Gradients averaged in every step by DDP, whole or compressed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from training.config import TrainConfig
from training.synchronize_config import SynchronizeConfig

_OWN_ARRAYS = ("error_dict", "p_memory_dict", "q_memory_dict")


class EveryStep:
    """Gradients are averaged in every step by DDP, compressed if the config says so."""

    def __init__(self, config: SynchronizeConfig, forwards: Sequence[nn.Module]) -> None:
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        forward = forwards[0]
        if config.compress == "none" or not isinstance(forward, DistributedDataParallel):
            return  # alone, a worker sends nothing
        self._device = next(forward.parameters()).device
        if config.compress == "fp16":
            forward.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif config.compress == "bf16":
            forward.register_comm_hook(None, _compress_to_bf16)
        else:
            self._powersgd = powerSGD_hook.PowerSGDState(
                process_group=None,
                matrix_approximation_rank=config.powersgd_rank,
                start_powerSGD_iter=config.powersgd_start_step,
                orthogonalization_epsilon=1e-8,
            )
            forward.register_comm_hook(self._powersgd, _compress_to_matrices)

    def after_step(self, step: int) -> None:
        """Nothing: DDP has averaged the gradients."""

    def describe(self) -> dict[str, float]:
        return {}

    def consolidated(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """Nothing: the models are equal."""

    def state_dict(self) -> dict[str, Any]:
        """Of PowerSGD: how many steps it has seen, what it left out, and its matrices."""
        if self._powersgd is None:
            return {}
        state = self._powersgd.rng.get_state(legacy=False)["state"]
        return {
            "world_size": dist.get_world_size(),
            "iter": self._powersgd.iter,
            "rng": {
                "keys": torch.from_numpy(state["key"].astype(np.int64)),
                "position": int(state["pos"]),
            },
            "arrays": {name: dict(getattr(self._powersgd, name)) for name in _OWN_ARRAYS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As the protocol says; what PowerSGD left out in another number of ranks is lost."""
        if self._powersgd is None:
            return
        self._powersgd.iter = state["iter"]
        keys = state["rng"]["keys"].numpy().astype(np.uint32)
        self._powersgd.rng.set_state(("MT19937", keys, state["rng"]["position"], 0, 0.0))
        same = state["world_size"] == dist.get_world_size()
        for name, arrays in state["arrays"].items():
            kept = {index: array.to(self._device) for index, array in arrays.items()}
            setattr(self._powersgd, name, kept if same else {})


def wrap_copy(config: TrainConfig, model: nn.Module) -> nn.Module:
    """A whole copy of the model as it is called: with DDP around it, unless it is alone or its
    gradient is its own business."""
    if config.dims.dp_replicate == 1 or config.reproducible or config.synchronize.is_local:
        return model
    if config.synchronize.compress != "powersgd":
        return DistributedDataParallel(model)
    # PowerSGD's state is kept by bucket. DDP cuts the buckets anew after its first step, also after
    # a resume, unless it looks for unused parameters. (It warns once that it found none.)
    return DistributedDataParallel(model, find_unused_parameters=True)


def _compress_to_bf16(state: Any, bucket: GradBucket) -> Future[Tensor]:
    # DDP looks at the name of torch's own hook and refuses it without a GPU; gloo sends bf16.
    return default_hooks.bf16_compress_hook(state, bucket)


def _compress_to_matrices(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    # torch's hook goes on in callbacks of other threads. Those of two buckets could send in one
    # order here and in another order in the next rank, so each bucket is waited for.
    done: Future[Tensor] = Future()
    done.set_result(powerSGD_hook.powerSGD_hook(state, bucket).wait())
    return done
