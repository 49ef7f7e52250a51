"""What a workload says of how its model may be split, checked: the silent traps are refused here.

A pipeline stage without parameters would hang until a timeout; a parameter that two stages share
would become two; one that lies in no stage would never be trained.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from training.config import TrainConfig
from training.errors import WorkloadError
from training.workload import Fields, Workload, check_params

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle

_FIELD = "params.yaml: train.dims"


def check_plans(workload: Workload, config: TrainConfig) -> None:
    """Build the model and split it as asked, once, before a process starts. Loads torch, if there
    is something to split.

    Raises WorkloadError naming params.yaml's field, the workload's file and the remedy.
    """
    dims = config.dims
    if dims.tp > 1:
        _check_has(workload, "tp_plan", f"tp: {dims.tp}", "split its layers")
        check_params(workload, "tp_plan", _options(config), "train", num_before=2)
    if dims.pp > 1:
        _check_has(workload, "pp_split", f"pp: {dims.pp}", "cut it into stages")
    if dims.tp > 1 or dims.pp > 1:
        model = workload.model(config.model)
        read_plan(workload, model, config)
        read_stages(workload, model, config)


def read_plan(
    workload: Workload, model: "nn.Module", config: TrainConfig
) -> "dict[str, ParallelStyle]":
    """For each submodule that is split by tensor parallelism its style; none for `tp: 1`."""
    tp = config.dims.tp
    if tp == 1:
        return {}
    patterns = workload.tp_plan(model, tp, _options(config))
    names = [name for name, _ in model.named_modules()]
    plan = {}
    for pattern, style in patterns.items():
        matching = [name for name in names if _matches(name, pattern)]
        if not matching:
            raise WorkloadError(
                f"{_where(workload, 'tp_plan')} names '{pattern}', which is no submodule of the "
                "model: correct the name"
            )
        plan.update(dict.fromkeys(matching, style))
    _check_divisible(workload, model, plan, tp)
    _check_untied(workload, model, plan)
    return plan


def read_stages(
    workload: Workload, model: "nn.Module", config: TrainConfig
) -> "Sequence[nn.Module]":
    """The stages of the pipeline, the first to the last; the model itself for `pp: 1`."""
    if config.dims.pp == 1:
        return (model,)
    num_stages = config.dims.pp * config.pipeline.stages_per_worker
    expected = _name_parameters(model)
    stages = workload.pp_split(model, num_stages)
    where = _where(workload, "pp_split")
    for number, stage in enumerate(stages, 1):
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise WorkloadError(
                f"{where}: stage {number} of {num_stages} has no parameters, so there are more "
                f"stages than layers: lower {_FIELD}.pp or train.pipeline.stages_per_worker"
            )
    held = Counter(name for stage in stages for name in _name_parameters(stage))
    for wrong, what in (
        (expected.keys() - held.keys(), "lie in no stage"),
        (held.keys() - expected.keys(), "have names that the undivided model has not"),
        ([name for name, count in held.items() if count > 1], "lie in two stages"),
    ):
        if wrong:
            raise WorkloadError(f"{where}: these parameters {what}: {_list(wrong)}")
    for names in _find_tied(expected):
        if sum(not names.isdisjoint(_name_parameters(stage)) for stage in stages) > 1:
            raise WorkloadError(
                f"{where}: {_list(names)} are one parameter, tied, and lie in different stages, "
                f"where each would go its own way: keep them in one, or set {_FIELD}.pp: 1"
            )
    return stages


def rehearse_stages(
    workload: Workload, model: "nn.Module", rows: Sequence[Fields], config: TrainConfig
) -> None:
    """Pass a few records through the stages one after another, and through the undivided model.

    Raises WorkloadError when they give different answers: training would be of another model.
    """
    import torch

    if config.dims.pp == 1:
        return
    model.eval()
    with torch.inference_mode():
        inputs, _ = workload.collate(rows)
        expected = workload.forward(model, inputs)
        given = inputs
        for stage in read_stages(workload, model, config):
            given = workload.forward(stage.eval(), given)
            stage.train()
    model.train()
    if given.shape != expected.shape or not torch.allclose(given, expected, rtol=1e-4, atol=1e-5):
        raise WorkloadError(
            f"{_where(workload, 'pp_split')}: the stages one after another give another answer "
            "than the undivided model: mend what a stage does with what the one before it gave"
        )


def keep(plan: "Mapping[str, ParallelStyle]", part: "nn.Module") -> "dict[str, ParallelStyle]":
    """What of a plan is for this part of the model."""
    names = {name for name, _ in part.named_modules()}
    return {name: style for name, style in plan.items() if name in names}


def find_layers(model: "nn.Module") -> "tuple[nn.Module, ...]":
    """The repeated layers: the children of that list, dict or sequence of modules which holds the
    most parameters. Layers that share a parameter with another module are left out.
    """
    from torch import nn

    containers = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    ]
    if not containers:
        return ()
    largest = max(containers, key=lambda module: sum(p.numel() for p in module.parameters()))
    tied = _find_tied(_name_parameters(model))
    shared = {id(model.get_parameter(name)) for names in tied for name in names}
    layers = [list(child.parameters()) for child in largest.children()]
    return tuple(
        child
        for child, parameters in zip(largest.children(), layers, strict=True)
        if parameters and not any(id(parameter) in shared for parameter in parameters)
    )


def _options(config: TrainConfig) -> dict[str, bool]:
    """What the plan is asked for beyond its degree; so that a plan which does not know of a thing
    need not take it as an argument."""
    names = ("sequence_parallel", "loss_parallel")
    return {name: True for name in names if getattr(config, name)}


def _check_has(workload: Workload, function: str, degree: str, purpose: str) -> None:
    if not callable(getattr(workload.module, function, None)):
        raise WorkloadError(
            f"{_FIELD}.{degree}: {workload.module.__file__} has no {function}() that says how to "
            f"{purpose}: write one, or set {degree.split(':')[0]}: 1"
        )


def _where(workload: Workload, function: str) -> str:
    return f"{workload.module.__file__}: {function}()"


def _matches(name: str, pattern: str) -> bool:
    tokens, wanted = name.split("."), pattern.split(".")
    return len(tokens) == len(wanted) and all(map(fnmatchcase, tokens, wanted))


def _check_divisible(
    workload: Workload, model: "nn.Module", plan: "Mapping[str, ParallelStyle]", tp: int
) -> None:
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for name, style in plan.items():
        module = model.get_submodule(name)
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        is_linear = isinstance(module, nn.Linear)
        if isinstance(style, ColwiseParallel):
            dim = 0 if is_linear else 1
        elif isinstance(style, RowwiseParallel):
            dim = 1 if is_linear else 0
        else:
            continue
        size = module.weight.shape[dim]
        if size % tp:
            raise WorkloadError(
                f"{_where(workload, 'tp_plan')} splits '{name}' of {size} over {_FIELD}.tp: {tp}, "
                "which does not divide it: take a degree that does, or another size in train.model"
            )


def _check_untied(
    workload: Workload, model: "nn.Module", plan: "Mapping[str, ParallelStyle]"
) -> None:
    for names in _find_tied(_name_parameters(model)):
        owners = {name.rpartition(".")[0] for name in names}
        if owners & plan.keys():
            raise WorkloadError(
                f"{_where(workload, 'tp_plan')} splits {_list(names)}, which are one parameter, "
                "tied, and would become two: leave them out of the plan, or untie them"
            )


def _name_parameters(model: "nn.Module") -> "dict[str, Tensor]":
    """Every name, also where several are of one parameter."""
    return dict(model.named_parameters(remove_duplicate=False))


def _find_tied(parameters: "Mapping[str, Tensor]") -> list[set[str]]:
    names: defaultdict[int, set[str]] = defaultdict(set)
    for name, parameter in parameters.items():
        names[id(parameter)].add(name)
    return [same for same in names.values() if len(same) > 1]


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))
