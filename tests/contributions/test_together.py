"""Small gradients that are measured and summed as one matrix are what they are one by one."""

import pytest
import torch
from contributions_contract import per_example
from torch import nn

from dpbnn.contributions import attach, together
from dpbnn.contributions.sites import Slack
from dpbnn.contributions.together import Together, part_squares


def network():
    torch.manual_seed(0)
    blocks = [m for _ in range(3) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(30, 3))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 5, 6, generator=generator)
    return x, torch.randint(0, 3, (7,), generator=generator)


def flat(sums):
    return torch.cat([value.flatten().double() for value in sums.values()])


def test_norms_are_those_of_all_gradients_and_never_below():
    model, (x, y) = network(), data()
    c = attach(model, "categorical")(x, y)
    norms = c.norms()
    assert sum(isinstance(site, Together) for site in c._groups) == 1
    rows = [flat(c.weighted_sum(row)).norm() for row in torch.eye(7)]
    for norm, actual in zip(norms, rows, strict=True):
        assert actual <= norm <= actual * 1.001
    by_name = torch.stack(list(c.squared_norms().values())).sum(0).sqrt()
    torch.testing.assert_close(norms, by_name, rtol=1e-3, atol=0)


def test_one_sum_is_that_of_every_name_alone(monkeypatch):
    model, (x, y) = network(), data()
    x[2] = torch.nan
    w = torch.rand(7, generator=torch.Generator().manual_seed(2))
    c = attach(model, "categorical")(x, y)
    found = c.weighted_sum(w)
    apart = c.weighted_sum({name: w.clone() for name in c.shapes})
    monkeypatch.setattr(together, "_FEW", 1000)
    alone = attach(model, "categorical")(x, y).weighted_sum(w)
    assert found.keys() == apart.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value)
        torch.testing.assert_close(apart[name], value)
        assert found[name].shape == model.get_parameter(name).shape
    good = [i for i in range(7) if i != 2]
    exact = per_example(model, "categorical", x[good], y[good])
    for name, value in exact.items():
        wanted = torch.einsum("b,b...->...", w[good].to(value), value)
        torch.testing.assert_close(found[name].double(), wanted.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_bounds_on_rounding_add_up_to_no_less_than_one_by_one(seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    errors = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    gammas = [0.0, 0.1, 0.1, 0.3, 0.3, 2.0]
    slacks = [Slack(gamma, error) for gamma, error in zip(gammas, errors, strict=True)]
    wanted = sum((v.sqrt() + s.bound()).square() for v, s in zip(values, slacks, strict=True))
    torch.testing.assert_close(part_squares(list(zip(values, slacks, strict=True))).sum(0), wanted)
    mixed = [(values[0], 0.0), (values[1], slacks[1].bound())]
    mixed += zip(values[2:], slacks[2:], strict=True)
    torch.testing.assert_close(part_squares(mixed).sum(0), wanted)
