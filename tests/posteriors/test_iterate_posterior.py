"""Stored iterates and their low-rank summary."""

import copy
import pickle

import pytest
import torch
from posterior_contract import PosteriorContract, X, generator, network
from torch import nn

from dpbnn.posteriors import IteratePosterior, IterateWriter


def chain(model, path, count=10, scale=0.3, **settings):
    """Write iterates around the model's weights."""
    draws, values = generator(7), {n: p.detach() for n, p in model.named_parameters()}
    with IterateWriter(path, values, count, **settings) as writer:
        for _ in range(count):
            noisy = {
                n: v + scale * torch.randn(v.shape, generator=draws) for n, v in values.items()
            }
            writer.append(noisy)


class TestIterates(PosteriorContract):
    random = False

    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        model = model or network()
        chain(model, tmp_path / "chain")
        return IteratePosterior(model, likelihood, tmp_path / "chain", **record)


class TestSummary(PosteriorContract):
    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        model = model or network()
        chain(model, tmp_path / "chain")
        return IteratePosterior(model, likelihood, tmp_path / "chain", **record).summary(4)


def test_predictions_are_those_of_the_iterates(tmp_path):
    model = network()
    chain(model, tmp_path / "chain", count=7)
    posterior = IteratePosterior(model, "categorical", tmp_path / "chain")
    loop = []
    for i in range(7):
        weights = {n: t[0] for n, t in posterior.iterates.read([i]).items()}
        loop.append(torch.func.functional_call(model, weights, X))
    assert torch.allclose(posterior.outputs(X), torch.stack(loop), atol=1e-6)
    three = posterior.outputs(X, 3)
    assert torch.allclose(three, torch.stack([loop[1], loop[3], loop[6]]), atol=1e-6)


def test_frozen_parameters_are_the_models(tmp_path):
    model = network()
    stored = {n: p.detach() for n, p in model.named_parameters() if n.startswith("5")}
    with IterateWriter(tmp_path / "chain", stored, 2) as writer:
        writer.append(stored)
        writer.append({n: 2 * v for n, v in stored.items()})
    posterior = IteratePosterior(model, "categorical", tmp_path / "chain")
    assert torch.allclose(posterior.outputs(X)[1], 2 * model(X), atol=1e-6)


def test_bfloat16_iterates_predict_in_the_models_precision(tmp_path):
    model = network()
    chain(model, tmp_path / "half", dtype=torch.bfloat16)
    chain(model, tmp_path / "full")
    half = IteratePosterior(model, "categorical", tmp_path / "half").predict(X)
    full = IteratePosterior(model, "categorical", tmp_path / "full").predict(X)
    assert half.mean.dtype == torch.float32
    assert torch.allclose(half.mean, full.mean, atol=0.01)


def test_iterates_of_another_network_are_refused(tmp_path):
    chain(nn.Linear(3, 2), tmp_path / "chain")
    with pytest.raises(ValueError, match=r"iterates\['weight'\]"):
        IteratePosterior(nn.Linear(4, 2), "categorical", tmp_path / "chain")


def test_no_iterates_are_refused(tmp_path):
    with IterateWriter(tmp_path / "chain", dict(nn.Linear(3, 2).named_parameters()), 5):
        pass
    with pytest.raises(ValueError, match="no iterates yet"):
        IteratePosterior(nn.Linear(3, 2), "categorical", tmp_path / "chain")


def test_the_summary_has_the_iterates_mean_and_variance(tmp_path):
    """Draws of a linear model: 6 standard errors."""
    model = nn.Sequential(nn.Linear(3, 1))
    chain(model, tmp_path / "chain", count=400)
    posterior = IteratePosterior(model, "gaussian", tmp_path / "chain")
    summary = posterior.summary(rank=200)
    stacked = posterior.iterates.read(range(400))
    assert torch.allclose(summary.model[0].weight, stacked["0.weight"].mean(0), atol=1e-6)
    assert torch.allclose(summary.variance["0.weight"], stacked["0.weight"].var(0), atol=1e-6)
    x, count = torch.eye(3), 20_000
    drawn, exact = summary.outputs(x, count, seed=0)[..., 0], posterior.outputs(x, 400)[..., 0]
    error = (drawn.mean(0) - exact.mean(0)).abs()
    assert (error < 6 * (exact.var(0) / count).sqrt()).all()
    ratio = drawn.var(0) / exact.var(0)
    assert (ratio - 1).abs().max() < 0.15
    with pytest.raises(ValueError, match="rank=401"):
        posterior.summary(401)


def test_a_pickle_holds_the_path_of_the_iterates(tmp_path):
    model = network()
    chain(model, tmp_path / "chain")
    posterior = IteratePosterior(model, "categorical", tmp_path / "chain")
    pickled = pickle.dumps(posterior)
    for again in (pickle.loads(pickled), copy.deepcopy(posterior)):
        assert torch.equal(again.outputs(X), posterior.outputs(X))
    (tmp_path / "chain").rename(tmp_path / "other")
    with pytest.raises(FileNotFoundError, match=r"use posterior\.save, dpbnn\.load"):
        pickle.loads(pickled)
