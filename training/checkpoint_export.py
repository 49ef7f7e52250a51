"""A checkpoint's parameters as one safetensors file, from whatever layout wrote it."""

from pathlib import Path

from safetensors.torch import save_model

from storage.errors import ConvoyError
from training.checkpoint import open_checkpoint
from training.checkpoint_commit import Found
from training.checkpoint_files import CheckpointFiles
from training.checkpoint_state import load_state
from training.errors import CheckpointError
from training.workload import Workload


def export_weights(files: CheckpointFiles, found: Found, workload: Workload, output: Path) -> None:
    """Write the file whole, as the training's own at its end: `load_model` of safetensors reads it.

    Raises CheckpointError for a checkpoint that was changed, or that does not fit the workload's
    model as it is now; OSError for a file that cannot be written.
    """
    files.check(found)
    model = workload.model(found.commit.identity["train"]["model"])
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    try:
        with open_checkpoint(files, found) as opened:
            load_state(state, opened.metadata, opened.open)
    except (ConvoyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{found.name} cannot be read into the workload's model "
            f"({type(error).__name__}: {error}): it was changed, or the model's code was"
        ) from error
    model.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
    output.parent.mkdir(parents=True, exist_ok=True)
    pending = output.with_name(f".{output.name}.new")
    save_model(model, str(pending))
    pending.replace(output)
