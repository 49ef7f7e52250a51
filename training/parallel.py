"""Degrees of parallelism applied to a workload's model."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from training.config import ParallelDims, TrainConfig
from training.errors import TrainingError
from training.timing import StepTimer
from training.workload import Workload

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, the one whose ranks speak least outermost."""


def choose_device() -> torch.device:
    """This rank's GPU where there is one, else the CPU."""
    return torch.device("cpu")


def build_mesh(dims: ParallelDims, device: torch.device) -> DeviceMesh:
    """All ranks as a mesh of four axes. Raises TrainingError for another number of ranks."""
    if dims.world_size != dist.get_world_size():
        raise TrainingError(
            f"params.yaml: train.dims multiply to {dims.world_size} workers, and there are "
            f"{dist.get_world_size()}: let `convoy` start them, or mend the degrees"
        )
    sizes = tuple(getattr(dims, axis) for axis in AXES)
    return init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


@dataclass(frozen=True)
class ParallelModel:
    """What this rank holds of the model, and how a batch goes through it."""

    parts: tuple[nn.Module, ...]
    """One, or with pipeline stages one for each stage of this rank. Parameter names are those of
    the undivided model."""
    mesh: DeviceMesh
    workload: Workload
    forward: nn.Module
    """The part as it is called: with what averages gradients around it."""

    @property
    def replica(self) -> int:
        """Which part of each global batch this rank works on."""
        return self._rank("dp_replicate") * self.mesh["dp_shard"].size() + self._rank("dp_shard")

    @property
    def stages(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other stages of this model."""
        return None if self.mesh["pp"].size() == 1 else self.mesh["pp"].get_group()

    def seed_after_start(self, seed: int) -> None:
        """The copies start equal; what is drawn from here on, such as dropout, differs between
        replicas and stages, and not between the parts of one layer."""
        num_replicas = self.mesh["dp_replicate"].size() * self.mesh["dp_shard"].size()
        num_streams = num_replicas * self.mesh["pp"].size()
        torch.manual_seed(seed * num_streams + self._rank("pp") * num_replicas + self.replica)

    def forward_backward(self, inputs: Tensor, target: Tensor, timer: StepTimer) -> Tensor:
        """Add a batch's gradient; the mean loss over this rank's samples.

        Where the loss is not finite, the gradient is made so too: when replicas have averaged it,
        all of them know, without a word more between them.
        """
        with timer.phase("forward"):
            loss = self.workload.loss(self.forward(inputs), target)
        with timer.phase("backward"):
            timer.watch_backward(loss)
            loss.backward(1 + 0 * loss.detach())  # type: ignore[no-untyped-call]
        return loss.detach()

    def _rank(self, axis: str) -> int:
        return self.mesh[axis].get_local_rank()


def parallelize(
    workload: Workload, model: nn.Module, config: TrainConfig, mesh: DeviceMesh
) -> ParallelModel:
    """Spread a model over the mesh. Every rank gives the same model, whole."""
    return ParallelModel((model,), mesh, workload, DistributedDataParallel(model))
