"""What of a workload's plans is refused, and how: nothing is started for it."""

import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.parallel_steps import configure, places
from training.errors import WorkloadError
from training.plans import check_plans, find_layers, read_stages, rehearse_stages
from training.workload import Workload


def made(tmp_path: Path, **functions: Callable[..., Any]) -> Workload:
    """A workload of two linear layers, tied if the functions say so, and what else they give."""
    from torch import nn

    module = types.ModuleType("made")
    module.__file__ = "made.py"
    own = {"model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}
    for name, function in (own | functions).items():
        setattr(module, name, function)
    return Workload(module, tmp_path / "detail.txt")


def tied() -> Any:
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def in_two(model: Any, num_stages: int) -> list[Any]:
    """Named as in the undivided model."""
    from torch import nn

    children = list(model.named_children())
    middle = len(children) // num_stages
    return [nn.Sequential(OrderedDict(part)) for part in (children[:middle], children[middle:])]


def refused(workload: Workload, *words: str, **settings: Any) -> None:
    settings.setdefault("model", {})
    with pytest.raises(WorkloadError) as found:
        check_plans(workload, configure(**settings))
    for word in words:
        assert word in str(found.value)


TP, PP = {"dp_replicate": 1, "tp": 2}, {"dp_replicate": 1, "pp": 2}


def test_what_the_workload_lacks(tmp_path: Path) -> None:
    refused(made(tmp_path), "params.yaml: train.dims.tp: 2: made.py has no tp_plan()", dims=TP)
    refused(made(tmp_path), "params.yaml: train.dims.pp: 2: made.py has no pp_split()", dims=PP)
    check_plans(made(tmp_path), configure(model={}, dims={"dp_shard": 2}))
    plain = made(tmp_path, tp_plan=lambda model, degree: {})
    words = "params.yaml: train: got an unexpected keyword argument 'sequence_parallel'"
    refused(plain, words, dims=TP, sequence_parallel=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dims": {"dp_replicate": 1, "tp": 3}}, "tp_plan(): tp 3 does not divide num_heads 4"),
        ({"dims": {"dp_replicate": 1, "pp": 8}}, "pp_split(): 8 stages of the 4 layers"),
    ],
)
def test_degrees_that_do_not_fit_the_place_names(settings: dict[str, Any], words: str) -> None:
    model = configure().model
    refused(places(), words, model=model, pipeline={"microbatches": 8}, **settings)


def test_a_plan(tmp_path: Path) -> None:
    from torch import nn
    from torch.distributed.tensor.parallel import ColwiseParallel

    def planned(names: str, model: Callable[..., Any] | None = None) -> Workload:
        plan = {name: ColwiseParallel() for name in names.split()}
        more = {"model": model} if model else {}
        return made(tmp_path, tp_plan=lambda model, degree: plan, **more)

    refused(planned(""), "tp_plan() gave a dict: return a ParallelStyle", dims=TP)
    refused(planned("0 7"), "names '7', which is no submodule of the model", dims=TP)
    refused(planned("0"), "splits '0' of 4 over", "tp: 3", dims={"dp_replicate": 1, "tp": 3})
    words = "splits '0.weight', '2.weight', which are one parameter, tied"
    refused(planned("2", tied), words, dims=TP)
    check_plans(planned("*", lambda: nn.Sequential(nn.Linear(4, 4))), configure(dims=TP, model={}))


def test_stages(tmp_path: Path) -> None:
    from torch import nn

    def split(stages: Callable[..., Any], model: Callable[..., Any] | None = None) -> Workload:
        more = {"model": model} if model else {}
        return made(tmp_path, pp_split=stages, **more)

    refused(split(lambda m, n: [m]), "gave a list: return 2 modules, the stages", dims=PP)
    # torch would wait for this one until a timeout.
    refused(split(lambda m, n: [m, nn.Tanh()]), "stage 2 of 2 has no parameters", dims=PP)
    refused(split(lambda m, n: [m[:1], m[:1]]), "lie in no stage: '1.bias', '1.weight'", dims=PP)
    refused(split(lambda m, n: [m, m[:1]]), "lie in two stages: '0.bias', '0.weight'", dims=PP)
    refused(split(lambda m, n: [m, nn.ModuleDict({"x": m[1]})]), "'x.bias', 'x.weight'", dims=PP)
    words = "'0.weight', '2.weight' are one parameter, tied, and lie in different stages"
    refused(split(in_two, tied), words, dims=PP)
    check_plans(split(in_two), configure(dims=PP, model={}))


def test_stages_that_are_another_model(tmp_path: Path) -> None:
    import torch
    from torch import nn

    def collate(rows: Any) -> Any:
        return torch.ones(len(rows), 4), torch.ones(len(rows))

    config = configure(dims=PP, model={})
    good = made(tmp_path, pp_split=in_two, collate=collate)
    rehearse_stages(good, good.model({}), [{"x": 1}], config)

    class Doubled(nn.Sequential):
        def forward(self, x: Any) -> Any:
            for layer in self:
                x = layer(x)
            return 2 * x

    def doubling(model: Any, num_stages: int) -> list[Any]:
        first, second = in_two(model, num_stages)
        return [Doubled(OrderedDict(first.named_children())), second]

    bad = made(tmp_path, pp_split=doubling, collate=collate)
    with pytest.raises(WorkloadError, match="give another answer than the undivided model"):
        rehearse_stages(bad, bad.model({}), [{"x": 1}], config)


def test_layers() -> None:
    from torch import nn

    model = places().model(configure().model)
    assert [type(layer).__name__ for layer in find_layers(model)] == ["Block"] * 4
    assert find_layers(nn.Linear(2, 2)) == ()
    assert find_layers(tied()) == ()  # they share a parameter: they stay with the whole
    assert len(read_stages(places(), model, configure(dims=PP))) == 2
