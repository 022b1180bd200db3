"""Posteriors and data whose true temperature is known, for the tests of calibration."""

import torch
from torch import nn

import dpbnn
from dpbnn.posteriors import PointPosterior


def trained(epsilon=1.0, **details):
    """The statement of a training of n = 8000 that took no part in these tests."""
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-5, n=8000, batch_size=200, steps=50)
    return plan.statement(labels=["sgld"], clip=1.0, **details)


def classes(n=3000, temperature=2.5, seed=0, privacy=None):
    """A linear classifier whose logits are `temperature` times too large, and records."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(5, 3, bias=False)
    with torch.no_grad():
        model.weight.normal_(0, 2, generator=torch.Generator().manual_seed(100))
    x = torch.randn(n, 5, generator=generator)
    p = (model(x) / temperature).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    return PointPosterior(model, "categorical", privacy=privacy), (x, y)


def reals(n=3000, noise=2.0, seed=0, privacy=None):
    """A regression whose noise is `noise` where the model says 1, and records."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(5, 1)
    with torch.no_grad():
        model.weight.normal_(generator=torch.Generator().manual_seed(100))
    x = torch.randn(n, 5, generator=generator)
    y = model(x).detach()[:, 0] + noise * torch.randn(n, generator=generator)
    return PointPosterior(model, "gaussian", privacy=privacy), (x, y)
