"""Degrees of parallelism applied to a workload's model, in one fixed order."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from training.compression import wrap_copy
from training.config import ParallelDims, TrainConfig
from training.errors import TrainingError, WorkloadError
from training.passes import WholeModel, checkpoint_activations, compute_loss
from training.pipelining import Pipeline, place_stages
from training.plans import find_layers, keep, read_plan, read_stages
from training.reproducible import VirtualRanks
from training.timing import StepTimer
from training.workload import Workload

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, the one whose ranks speak least outermost."""


def choose_device() -> torch.device:
    """A GPU of its own for each worker on this machine where there are so many, else the CPU."""
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if torch.cuda.device_count() < num_local:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """All ranks as a mesh of four axes. Raises TrainingError for another number of ranks."""
    if dims.world_size != dist.get_world_size():
        raise TrainingError(
            f"params.yaml: train.dims multiply to {dims.world_size} workers, and there are "
            f"{dist.get_world_size()}: let `convoy` start them, or mend the degrees"
        )
    sizes = tuple(getattr(dims, axis) for axis in AXES)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    if dims.dp_shard > 1 and dims.tp > 1:
        mesh["dp_shard", "tp"]._flatten()  # so that a norm over both is one sum, in one order
    return mesh


@dataclass(frozen=True)
class ParallelModel:
    """What this rank holds of the model, and how a batch goes through it."""

    parts: tuple[nn.Module, ...]
    """One, or with pipeline stages one for each stage of this rank. Parameter names are those of
    the undivided model."""
    mesh: DeviceMesh
    forward_backward: Callable[[Tensor, Tensor, StepTimer], Tensor]
    """Of a replica's batch, in each of its ranks: adds the gradient, gives the mean loss.

    Where the loss is not finite, the gradient is made so too: when the ranks have averaged it, all
    of them know, without a word more between them.
    """
    forwards: Sequence[nn.Module]
    """The parts as they are called: with what averages gradients around them."""
    batches_per_step: int = 1
    """How many batches a step is, each to be given to `forward_backward`."""

    @property
    def replica(self) -> int:
        """Which part of each global batch this rank works on."""
        return self._rank("dp_replicate") * self.mesh["dp_shard"].size() + self._rank("dp_shard")

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages of this replica."""
        return None if self.mesh["pp"].size() == 1 else self.mesh["pp"].get_group()

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this is the first rank of those that hold the same stages, whole or in parts."""
        return all(self._rank(axis) == 0 for axis in AXES if axis != "pp")

    def seed_after_start(self, seed: int) -> None:
        """The copies start equal; what is drawn from here on, such as dropout, differs between
        replicas and stages, and not between the parts of one layer."""
        num_replicas = self.mesh["dp_replicate"].size() * self.mesh["dp_shard"].size()
        num_streams = num_replicas * self.mesh["pp"].size()
        torch.manual_seed(seed * num_streams + self._rank("pp") * num_replicas + self.replica)

    def check_unsplit(self) -> None:
        """Raise WorkloadError when the tensor-parallel ranks of this replica have unlike gradients
        of a parameter that they hold alike: each has seen a part of the sequence alone, and
        nothing would sum them. Called by every rank, with a gradient.
        """
        axis = self.mesh["tp"]
        if axis.size() == 1:
            return
        norms = {
            name: _local(parameter.grad).float().norm()
            for part in self.parts
            for name, parameter in part.named_parameters()
            if parameter.grad is not None and not _is_on(parameter, "tp")
        }
        if not norms:
            return
        low = torch.stack(list(norms.values()))
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, axis.get_group())
        dist.all_reduce(high, dist.ReduceOp.MAX, axis.get_group())
        unlike = [
            name
            for name, is_unlike in zip(norms, high - low > 1e-3 * high, strict=True)
            if is_unlike
        ]
        if unlike:
            raise WorkloadError(
                f"tp_plan() leaves out {', '.join(unlike)}, which the ranks of dims.tp hold alike, "
                "and whose gradients differ between them: name these modules in the plan (norms as "
                "SequenceParallel), or set params.yaml: train.sequence_parallel: false"
            )

    def _rank(self, axis: str) -> int:
        return self.mesh[axis].get_local_rank()


def parallelize(
    workload: Workload, model: nn.Module, config: TrainConfig, mesh: DeviceMesh
) -> ParallelModel:
    """Spread a model over the mesh: stages, then in each of them tensor parallelism, activation
    checkpointing, compilation, and last what shards it or averages its gradient.

    Every rank gives the same model, whole. Raises WorkloadError for what its plans do not allow.
    """
    dims, device = config.dims, torch.device(mesh.device_type)
    plan = read_plan(workload, model, config)
    stages = read_stages(workload, model, config)
    held = place_stages(config.pipeline, dims.pp)[mesh["pp"].get_local_rank()]
    parts = tuple(stages[number].to(device) for number in held)
    forwards = []
    for part in parts:
        layers = find_layers(part)
        if plan:
            parallelize_module(part, mesh["tp"], keep(plan, part), src_data_rank=None)
        if config.activation_checkpointing == "full":
            checkpoint_activations(workload, layers)
        if config.compile:
            for layer in layers or (part,):
                # torch 2.13 recurses without end where it traces a split layer for varying lengths.
                layer.compile(dynamic=False if dims.tp > 1 else None)
        forwards.append(_average_gradients(part, layers, config, mesh))
    loss = partial(compute_loss, workload)
    around = loss_parallel if config.loss_parallel else nullcontext
    if dims.pp > 1:
        group = mesh["pp"].get_group()
        pipeline = Pipeline(forwards, group, device, config.pipeline, loss, around)
        return ParallelModel(parts, mesh, pipeline, forwards)
    through = WholeModel(forwards[0], config.accumulate, loss, around)
    if config.reproducible:
        virtual = VirtualRanks(parts[0], through, config.virtual_ranks, config.seed)
        return ParallelModel(parts, mesh, virtual, forwards, virtual.num_local)
    return ParallelModel(parts, mesh, through, forwards)


def _average_gradients(
    part: nn.Module, layers: Iterable[nn.Module], config: TrainConfig, mesh: DeviceMesh
) -> nn.Module:
    """The part as it is called, so that replicas get the mean of their gradients; or sharded."""
    dims, is_low = config.dims, config.precision == "bfloat16"
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_low else MixedPrecisionPolicy()
    )
    if dims.tp > 1:
        part.register_forward_hook(_own_output)
    if dims.dp_shard > 1:
        axes = ("dp_replicate", "dp_shard") if dims.dp_replicate > 1 else ("dp_shard",)
        # The microbatches of a pipeline come soon after each other; and a schedule that takes
        # backward passes apart would not find the gradients of layers that were sharded between.
        keeps_whole = dims.pp > 1
        for module in (*layers, part):
            fully_shard(
                module, mesh=mesh[axes], mp_policy=policy, reshard_after_forward=not keeps_whole
            )
        return part
    if dims.dp_replicate > 1 and dims.world_size > dims.dp_replicate:
        # DDP does not know of split layers, nor of pipeline schedules; the older of torch's two
        # composable replicate() gives wrong numbers for split layers, and says nothing.
        for module in (*layers, part):
            replicate(module, mesh=mesh["dp_replicate"], mp_policy=policy)
        return part
    if is_low:
        part.forward = torch.autocast(mesh.device_type, torch.bfloat16)(part.forward)
    return wrap_copy(config, part)


def _own_output(part: nn.Module, inputs: object, output: Tensor) -> Tensor:
    # A view would lose what FSDP hangs on it when a loss changes it in place.
    return output.clone() if output._is_view() else output


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_on(tensor: Tensor, axis: str) -> bool:
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())
