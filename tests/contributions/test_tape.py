"""Layers that are built in the backward pass, such as norms: same gradients, nothing held."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import dpbnn
from dpbnn.contributions.tape import Tape
from dpbnn.networks.layers import register


class Gain(nn.Module):
    """sigmoid(w x), whose own backward pass needs its output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return torch.sigmoid(self.weight * x)


def _gain(layer, record):
    def by_weight(x, g):
        s = torch.sigmoid(layer.weight.detach() * x)
        return g * x * s * (1 - s)

    def forward(x):
        return record.direct(x, Gain.forward(layer, x), {"weight": by_weight})

    return forward


register(Gain, _gain, saved=None)

NETWORKS = {
    "first": lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)),
    "alone": lambda: nn.Sequential(nn.LayerNorm(6)),
    "changed in place": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)
    ),
    "output is needed": lambda: nn.Sequential(nn.Linear(6, 6), Gain(), nn.Linear(6, 3)),
    "twice": lambda: (
        lambda norm: nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), norm, nn.Linear(6, 3))
    )(nn.LayerNorm(6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_those_of_autograd(name):
    torch.manual_seed(0)
    model = NETWORKS[name]()
    x, y, w = torch.randn(5, 6), torch.randint(0, 3, (5,)), torch.rand(5)
    c = dpbnn.attach(model, "categorical")(x, y)
    found, squares = c.weighted_sum(w), c.squared_norms()
    for row in range(5):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        for key, parameter in model.named_parameters():
            own = parameter.grad.double().square().sum()
            assert own <= squares[key][row] * (1 + 1e-5)
            assert squares[key][row] <= own * 1.01 + 1e-9
            found[key] = found[key] - w[row] * parameter.grad
    for value in found.values():
        torch.testing.assert_close(value, torch.zeros_like(value), rtol=0, atol=1e-5)


def test_inputs_of_norms_are_not_held(monkeypatch):
    """They were a third of what private training of a transformer held."""
    seen, tap = {}, Tape.tap

    def noted(tape, path, a, *arguments, **options):
        seen[path] = StorageWeakRef(a.untyped_storage())
        return tap(tape, path, a, *arguments, **options)

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    attached = dpbnn.attach(model, "categorical")
    x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
    attached.probe(x, y)
    monkeypatch.setattr(Tape, "tap", noted)
    contributions = attached(x, y)
    assert seen["2"].expired()
    assert not seen["4"].expired()
    assert contributions.norms().shape == (4,)
