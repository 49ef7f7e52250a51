"""The norm of a gradient, its scaling, and the steps that are taken by it."""

import copy
import math

import pytest
import torch
from torch import nn

from training.config import OptimizerConfig
from training.optimization import Gradients, build_optimizers, take_step


def model_with_gradient() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))
    model(torch.randn(11, 7)).square().sum().backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "share", [1e-3, 0.5, 0.99, 0.9989, 1 - 1e-6, 1.0, 1 + 1e-6, 1.0009, 1.0011, 1.5, 100.0]
)
def test_it_leaves_the_bits_that_torch_leaves(share: float) -> None:
    """Also where the limit is a hair from the norm: what is not scaled would not have changed."""
    ours = model_with_gradient()
    theirs = copy.deepcopy(ours)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        its.grad = None if mine.grad is None else mine.grad.clone()
    norm = float(torch.nn.utils.get_total_norm(gradients(ours)))
    wanted = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), share * norm))
    assert Gradients([ours]).clip(share * norm) == wanted == norm
    assert all(map(torch.equal, gradients(ours), gradients(theirs)))


def test_without_a_limit_it_measures_alone() -> None:
    model = model_with_gradient()
    before = [g.clone() for g in gradients(model)]
    assert Gradients([model]).clip(None) > 0
    assert all(map(torch.equal, gradients(model), before))


def test_a_gradient_that_is_no_number_is_told() -> None:
    model = model_with_gradient()
    gradients(model)[0][0] = torch.nan
    assert math.isnan(Gradients([model]).clip(1.0))


class _Wandering(nn.Module):
    """In some steps a layer is left out, and its parameters have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, is_short: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(x)
        normal: torch.Tensor = self.norm(hidden if is_short else self.second(hidden))
        return normal * self.frozen


def _state(optimizer: torch.optim.Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {(n, name): value for n, values in state.items() for name, value in values.items()}


def test_it_steps_to_the_bits_that_torch_steps_to() -> None:
    """Also with gradients that come and go, after a resume, and in what a checkpoint holds."""
    torch.manual_seed(0)
    ours = _Wandering()
    theirs = copy.deepcopy(ours)
    config = OptimizerConfig(lr=0.01, weight_decay=0.1)
    [optimizer] = build_optimizers([ours], config)
    groups = [
        {"params": [p for p in theirs.parameters() if (p.ndim < 2) == is_vector]}
        | {"weight_decay": 0.0 if is_vector else 0.1}
        for is_vector in (False, True)
    ]
    torchs = torch.optim.AdamW(groups, lr=0.01, betas=config.betas, fused=True)
    for step in range(12):
        inputs = torch.randn(11, 7)
        for model in (ours, theirs):
            model(inputs, step in (0, 5, 6)).square().sum().backward()
        take_step([optimizer], 0.01 / (1 + step))
        take_step([torchs], 0.01 / (1 + step))
        Gradients([ours]).forget()
        torchs.zero_grad()
        if step == 8:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        found, wanted = _state(optimizer), _state(torchs)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
