"""Steps of the place names' model on made-up places, under any degrees; and by one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import TrainConfig
from training.workload import Workload, load_workload

ROOT = Path(__file__).parent.parent.parent
_COUNTRIES = ("FR", "JP", "DE", "US")


@dataclass
class Steps:
    """What some steps of training gave."""

    losses: list[float]
    """Mean over the global batch, of each step."""
    norms: list[float]
    gradients: dict[str, Any]
    """Of the last step, whole, as NumPy arrays: those of the parameters that this rank holds."""
    parameters: dict[str, Any]


def configure(**settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "region": "eu",
        "steps": 3,
        "global_batch": 16,
        "seed": 5,
        "optimizer": {"name": "sgd", "lr": 0.05, "grad_clip": 20.0},
        "model": {"max_length": 16, "width": 32, "num_heads": 4, "num_layers": 4},
        "dims": {"dp_replicate": 1},
    }
    return TrainConfig.model_validate(defaults | settings)


def places() -> Workload:
    return load_workload("examples.place_names", ROOT)


def take_steps(config: TrainConfig) -> Steps:
    """In each rank of a process group: train on made-up batches whose lengths differ by step."""
    import torch
    import torch.distributed as dist

    from training.optimization import Gradients, build_optimizers, learning_rate, take_step
    from training.parallel import build_mesh, choose_device, parallelize
    from training.timing import StepTimer

    workload = places()
    device = choose_device()
    mesh = build_mesh(config.dims, device)
    torch.manual_seed(config.seed)
    model = parallelize(workload, workload.model(config.model), config, mesh)
    model.seed_after_start(config.seed)
    optimizers = build_optimizers(model.parts, config.optimizer)
    gradients = Gradients(model.parts, model.stages)
    size = config.global_batch // config.dims.num_replicas
    steps = Steps([], [], {}, {})
    for step in range(1, config.steps + 1):
        rows = make_places(config.global_batch, step)
        inputs, target = workload.collate(rows[model.replica * size : (model.replica + 1) * size])
        loss = model.forward_backward(inputs, target, StepTimer())
        model.check_unsplit()
        dist.all_reduce(loss)
        steps.losses.append(loss.item() / dist.get_world_size())
        steps.norms.append(gradients.clip(config.optimizer.grad_clip))
        if step == config.steps:
            steps.gradients = _gather(model.parts, gradient=True)
        take_step(optimizers, learning_rate(config.optimizer, step, config.steps))
        gradients.forget()
    steps.parameters = _gather(model.parts, gradient=False)
    return steps


def _gather(parts: Any, gradient: bool) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    whole = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            tensor = parameter.grad if gradient else parameter.detach()
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            whole[name] = full.numpy().copy()
    return whole


def make_places(count: int, step: int) -> list[dict[str, Any]]:
    """The longest name, of the step's length, comes once in every four rows."""
    rows = []
    for number in range(count):
        length = 4 + step if number % 4 == 0 else 1 + number % 4
        name = chr(97 + (number * 7 + step) % 26) * length
        rows.append({"country": _COUNTRIES[number % 4], "name": name, "own_name": ""})
    return rows
