"""The state of a training as named tensors: taken apart, staged, put back, whatever the degrees.

Names are those of the unsplit model's parameters (torch's distributed checkpoint, DCP, with a
flattened optimiser state), so any degrees load what any degrees wrote. DCP plans which rank writes
what; staging copies a rank's part into one buffer, which is all that a training step waits for.
"""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from storage.sealed import SealedReader

_MODEL = "model."
_OPTIMIZER = "optimizer."
_HYPERPARAMETERS = "param_groups."
_ALIGN_BYTES = 64
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_PARTIAL = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)

State = dict[str, Any]
Place = tuple[str, int, int]
"""File, first byte and number of bytes of an item."""


def collect_state(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> State:
    """Tensors of parameters, buffers and optimiser by name; they share memory with the live ones.

    Hyperparameters of the optimiser are left out: they follow from the config and the step.
    """
    state: State = {}
    for part, optimizer in zip(parts, optimizers, strict=True):
        model = get_model_state_dict(part, options=_FLAT)
        state |= {f"{_MODEL}{name}": value for name, value in model.items()}
        inner = get_optimizer_state_dict(part, optimizer, options=_FLAT)
        state |= {
            f"{_OPTIMIZER}{name}": value
            for name, value in inner.items()
            if not name.startswith(_HYPERPARAMETERS)
        }
    return state


def restore_state(
    state: Mapping[str, Any], parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> None:
    """Put a loaded state into the model and the optimiser, which keeps its hyperparameters."""
    for part, optimizer in zip(parts, optimizers, strict=True):
        names = get_model_state_dict(part, options=_FLAT)
        model = {name: state[f"{_MODEL}{name}"] for name in names}
        set_model_state_dict(part, model, options=_FLAT)
        inner = get_optimizer_state_dict(part, optimizer, options=_FLAT)
        for name in inner:
            if not name.startswith(_HYPERPARAMETERS):
                inner[name] = state[f"{_OPTIMIZER}{name}"]
        set_optimizer_state_dict(part, optimizer, inner, options=_PARTIAL)


@dataclass(frozen=True)
class Staged:
    """A rank's part of the state as bytes, copied out of the training's way."""

    pieces: tuple[memoryview, ...]
    places: dict[MetadataIndex, tuple[int, int]]
    """First byte and number of bytes of each item in the pieces."""


class Stager:
    """Plans who writes what, once, and copies this rank's part into memory that is used again.

    Of what several ranks hold alike the lowest writes: DDP's buffers are rank 0's.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self._group = group
        self._planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        self._signature: object = None
        self._plan = SavePlan([])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        # One core copies half as fast as two, and copying lets go of the interpreter's lock.
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_cores = len(os.sched_getaffinity(0)) // workers
        self._pool = ThreadPoolExecutor(min(max(num_cores, 1), 4), thread_name_prefix="staging")
        self.metadata: Metadata | None = None
        """On rank 0, without the places."""

    def stage(self, state: State) -> Staged:
        """Copy. Called by every rank; the state is free to change when this returns."""
        is_first = dist.get_rank() == 0
        self._planner.set_up_planner(state, is_coordinator=is_first)
        signature = [(k, v.shape, v.dtype) for k, v in state.items() if isinstance(v, Tensor)]
        changed = torch.tensor([signature != self._signature], dtype=torch.uint8)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._group)
        if changed.item():
            self._make_plan(is_first)
            self._signature = signature
        return self._copy()

    def _make_plan(self, is_first: bool) -> None:
        local = self._planner.create_local_plan()
        world_size = dist.get_world_size()
        gathered: list[Any] | None = [None] * world_size if is_first else None
        dist.gather_object(local, gathered, group=self._group)
        mine: list[Any] = [None]
        plans: list[Any] | None = None
        if gathered is not None:
            plans, self.metadata = self._planner.create_global_plan(gathered)
        dist.scatter_object_list(mine, plans, group=self._group)
        self._plan = self._planner.finish_plan(mine[0])

    def _copy(self) -> Staged:
        places: dict[MetadataIndex, tuple[int, int]] = {}
        tensors: list[tuple[int, Tensor]] = []
        others: list[tuple[MetadataIndex, memoryview]] = []
        end = 0
        for item in self._plan.items:
            value = self._planner.resolve_data(item)
            if isinstance(value, Tensor):
                start = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
                end = start + value.nbytes
                places[item.index] = (start, value.nbytes)
                tensors.append((start, value.detach()))
            else:
                others.append((item.index, value.getbuffer()))
        self._fill(end, tensors)
        pieces = [self._buffer[:end].numpy().data]
        for index, content in others:
            places[index] = (end, len(content))
            end += len(content)
            pieces.append(content)
        return Staged(tuple(pieces), places)

    def _fill(self, num_bytes: int, tensors: Sequence[tuple[int, Tensor]]) -> None:
        on_device = any(tensor.device.type != "cpu" for _, tensor in tensors)
        if len(self._buffer) < num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_device)

        def copy(place: tuple[int, Tensor]) -> None:
            start, tensor = place
            target = self._buffer[start : start + tensor.nbytes].view(tensor.dtype)
            target.view(tensor.shape).copy_(tensor, non_blocking=on_device)

        filled = [place for place in tensors if place[1].nbytes]
        if on_device:
            for place in filled:
                copy(place)
            torch.accelerator.synchronize()
        else:
            list(self._pool.map(copy, filled))


def add_places(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> Metadata:
    """The metadata with where each item lies."""
    metadata.storage_data = dict(places)
    return metadata


def load_state(
    state: State,
    metadata: Metadata,
    open_file: Callable[[str], SealedReader],
    planner: LoadPlanner | None = None,
) -> None:
    """Read in place what this rank needs of a state, however it was cut when it was written.

    Raises what `open_file` and its readers raise, RuntimeError for a name that is not there.
    """
    planner = planner or DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    items = sorted(plan.items, key=lambda item: metadata.storage_data[item.storage_index])
    for item in items:
        file, start, num_bytes = metadata.storage_data[item.storage_index]
        content = open_file(file).read(start, start + num_bytes)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(content))
            continue
        target = planner.resolve_tensor(item).detach()
        whole = _chunk_of(metadata, item.storage_index, content, target.dtype)
        for dim, (offset, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            whole = whole.narrow(dim, offset, length)
        target.copy_(whole)
        planner.commit_tensor(item, target)


def load_whole(metadata: Metadata, open_file: Callable[[str], SealedReader]) -> State:
    """All that a checkpoint holds of model and optimiser, undivided. Raises likewise."""
    state: State = {}
    load_state(state, metadata, open_file, _EmptyStateDictLoadPlanner())  # type: ignore[no-untyped-call]
    return state


def _chunk_of(
    metadata: Metadata, index: MetadataIndex, content: bytes, dtype: torch.dtype
) -> Tensor:
    """The stored tensor, or the part of it that one rank wrote."""
    stored: Any = metadata.state_dict_metadata[index.fqn]
    dtype = stored.properties.dtype
    sizes = next(
        chunk.sizes
        for chunk in stored.chunks
        if index.offset is None or chunk.offsets == index.offset
    )
    if not content:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(sizes)


def copy_tensors(value: Any) -> Any:
    """The same structure of dicts, lists and tuples with tensors of its own, on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copy_tensors(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_tensors(inner) for inner in value)
    return value
