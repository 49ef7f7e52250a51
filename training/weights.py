"""The trained weights as one safetensors file, whatever the model was spread over."""

from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.config import TrainConfig
from training.errors import CheckpointError
from training.parallel import ParallelModel
from training.workload import Workload


def save_weights(model: ParallelModel, workload: Workload, config: TrainConfig, path: Path) -> None:
    """Write the whole model from rank 0. Called by every rank. Raises CheckpointError."""
    whole = model.parts[0]
    if config.dims.world_size > config.dims.dp_replicate:
        gathered = gather_weights(model)
        if dist.get_rank() == 0:
            whole = workload.model(config.model)
            whole.load_state_dict(gathered)
    if dist.get_rank() == 0:
        _save(whole, path)


def gather_weights(model: ParallelModel) -> dict[str, Tensor]:
    """Every parameter and buffer that is saved, whole, on the CPU: in rank 0. The first rank of
    each stage has the stage's, and the others none: of what they help to make whole they hold one
    at a time."""
    is_first_of_stage = model.is_first_of_stage
    own: dict[str, Tensor] = {}
    for part in model.parts:
        for name, value in part.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if is_first_of_stage:
                own[name] = whole.cpu()
            del whole
    if model.stages is None or not is_first_of_stage:
        return own
    is_first = model.stages.rank() == 0
    pieces: list[dict[str, Tensor]] | None = [{}] * model.stages.size() if is_first else None
    dist.gather_object(own, pieces, group=model.stages, group_dst=0)
    return {name: value for piece in pieces or [own] for name, value in piece.items()}


def _save(model: nn.Module, path: Path) -> None:
    try:
        save_model(model, str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); the last checkpoint is whole: make room or "
            "mend the disk and run `convoy stage train`, which goes on from it"
        ) from error
