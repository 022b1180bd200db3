"""A network at many draws: layers without weights run once for all of them."""

import pytest
import torch
from torch import nn

from dpbnn.networks import LearnedNoise, Steps, mlp
from dpbnn.posteriors import evaluate

X = torch.linspace(-3, 3, 12).reshape(4, 3)
TWICE = nn.Linear(3, 3)
NETWORKS = {
    "steps": mlp(3, (4,), 2, linear_path=True, steps=0.5),
    "limit": nn.Sequential(nn.Hardtanh(-2, 2), *mlp(3, (4,), 2, linear_path=True, steps=0.5)),
    "nested": nn.Sequential(mlp(3, (4,), 1, linear_path=True, steps=0.5), LearnedNoise(1)),
    "twice": nn.Sequential(nn.Flatten(), TWICE, nn.Flatten(), TWICE, Steps(3)),
    "plain": nn.Linear(3, 2),
}


def drawn(model):
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(5, *p.shape, generator=generator) for n, p in model.named_parameters()}


def outputs(model, busy, monkeypatch):
    monkeypatch.setattr(evaluate, "_BUSY", {"cpu": 0 if busy else 2**19, "cuda": 0})
    weights = drawn(model)
    found = evaluate.evaluate(model, evaluate.Draws(5, 1, lambda count: weights), (X,))
    with torch.no_grad():
        wanted = [
            torch.func.functional_call(model, {n: w[k] for n, w in weights.items()}, (X,))
            for k in range(5)
        ]
    return found, torch.stack(wanted)


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_those_of_the_whole_network(name, busy, monkeypatch):
    torch.testing.assert_close(*outputs(NETWORKS[name], busy, monkeypatch))


@pytest.mark.parametrize("name", ["steps", "limit", "nested"])
def test_first_layers_run_once_for_all_draws(name, monkeypatch):
    calls = []
    steps = Steps.forward
    monkeypatch.setattr(Steps, "forward", lambda self, x: calls.append(0) or steps(self, x))
    model = NETWORKS[name]
    weights = drawn(model)
    monkeypatch.setattr(evaluate, "_BUSY", {"cpu": 0, "cuda": 0})
    evaluate._activations(model, (X,))
    calls.clear()
    evaluate.evaluate(model, evaluate.Draws(5, 1, lambda count: weights), (X,))
    assert len(calls) == 1


def test_a_network_with_hooks_runs_as_it_is(monkeypatch):
    model, seen = mlp(3, (4,), 2), []
    model.register_forward_hook(lambda module, given, found: seen.append(given[0]))
    outputs(model, True, monkeypatch)
    assert all(given.shape[1:] == X.shape[1:] for given in seen)
    assert len(seen) >= 5
