"""The norm of a gradient, and its scaling."""

import copy

import pytest
import torch
from torch import nn

from training.optimization import clip


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
    assert clip([ours], share * norm) == wanted == norm
    assert all(map(torch.equal, gradients(ours), gradients(theirs)))


def test_without_a_limit_it_measures_alone() -> None:
    model = model_with_gradient()
    before = [g.clone() for g in gradients(model)]
    assert clip([model], None) > 0
    assert all(map(torch.equal, gradients(model), before))


def test_a_gradient_that_is_no_number_is_told() -> None:
    model = model_with_gradient()
    gradients(model)[0][0] = torch.nan
    assert clip([model], 1.0) != clip([model], 1.0)  # NaN
