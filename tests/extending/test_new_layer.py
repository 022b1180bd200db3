"""A new layer is one file: everything else works with it, without a word in the library."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from toy_layer import GaussianScale, Scale, rule

import dpbnn
from dpbnn.contributions import UnsupportedModel, attach
from dpbnn.networks import register, to_gaussian
from dpbnn.networks.layers import _LAYERS, registered
from dpbnn.posteriors.architecture import build, describe

FEATURES, CLASSES = 4, 3
ORIGINAL, BUILT = Scale.__init__, []


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        Scale(FEATURES), nn.Linear(FEATURES, 6), nn.Tanh(), Scale(6, bias=False), Scale(6),
        nn.Linear(6, CLASSES),
    )  # fmt: skip


def batch(n=8, positions=()):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(n, *positions, FEATURES, generator=source)
    return x, torch.randint(0, CLASSES, (n,), generator=source)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def truth(model, weights, x, y):
    """Per-example gradients of the negative log-likelihood, by torch.func."""

    def loss(weights, x, y):
        outputs = functional_call(model, weights, (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    return vmap(grad(loss), (None, 0, 0))(weights, x, y)


def assert_exact(contributions, gradients):
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).double().norm(dim=1)
    found = contributions.norms()
    assert (found >= norms * (1 - 1e-7)).all()
    torch.testing.assert_close(found, norms, rtol=2e-3, atol=0)
    w = torch.linspace(0.1, 1, len(norms))
    for name, value in contributions.weighted_sum(w).items():
        expected = torch.tensordot(w, gradients[name], 1)
        torch.testing.assert_close(value.float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", [(), (5,)])
def test_norms_and_sums_are_those_of_torch_func(positions):
    model = network()
    x, y = batch(positions=positions)
    model = nn.Sequential(*model, Mean()) if positions else model
    weights = {name: p.detach() for name, p in model.named_parameters()}
    attached = attach(model, "categorical")
    assert [unit.rule for unit in attached.units].count(rule) == 3
    assert_exact(attached(x, y), truth(model, weights, x, y))


@pytest.mark.parametrize("space", ["weights", "parameters"])
def test_the_gaussian_version_uses_the_same_rule(space):
    model = to_gaussian(network(), rho=-1.0)
    assert sum(isinstance(module, GaussianScale) for module in model.modules()) == 3
    x, y = batch()
    found = attach(model, "categorical", space=space)(x, y)
    (draw,) = found.draws
    drawn = network()
    mu = {n.removesuffix("_mu"): p for n, p in model.named_parameters() if n.endswith("_mu")}
    rho = {n.removesuffix("_rho"): p for n, p in model.named_parameters() if n.endswith("_rho")}
    weights = {n: (mu[n] + nn.functional.softplus(rho[n]) * draw[n]).detach() for n in mu}
    gradients = truth(drawn, weights, x, y)
    if space == "parameters":
        scale = {n: draw[n] * torch.sigmoid(rho[n]).detach() for n in rho}
        gradients = {f"{n}_mu": g for n, g in gradients.items()} | {
            f"{n}_rho": g * scale[n] for n, g in gradients.items()
        }
    assert_exact(found, gradients)


@pytest.mark.parametrize(
    "method", [dpbnn.SGD(learning_rate=0.1), dpbnn.BBP(learning_rate=0.1)], ids=lambda m: m.name
)
def test_it_is_trained_under_a_plan_saved_and_loaded(method, tmp_path):
    x, y = batch(60)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=60, batch_size=20, steps=6)
    start = network()
    posterior = dpbnn.fit(start, (x, y), "categorical", method=method, plan=plan)
    assert posterior.privacy.private
    kinds = [type(module) for module in posterior.model.modules()]
    assert kinds.count(Scale) == 3
    assert not torch.equal(posterior.model[0].weight, start[0].weight)
    posterior.save(tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    assert "Scale" in str(manifest["architecture"])
    again = dpbnn.posteriors.load(tmp_path / "saved")
    assert torch.equal(again.predict(x, 4, seed=0).mean, posterior.predict(x, 4, seed=0).mean)


def test_gaussian_networks_are_rebuilt_too():
    model = to_gaussian(network())
    again = build(json.loads(json.dumps(describe(model))))
    assert str(again) == str(model)


def test_a_wrong_rule_is_refused(monkeypatch):
    """The probe compares every rule with autograd."""

    def wrong(layer, record):
        def forward(x):
            z = x * layer.weight if layer.bias is None else x * layer.weight + layer.bias
            return record.direct(x, z, {"weight": lambda x, g: 2 * g, "bias": lambda x, g: g})

        return forward

    known = dataclasses.replace(registered(Scale(1)), rule=wrong)
    monkeypatch.setitem(_LAYERS, Scale, known)
    with pytest.raises(UnsupportedModel, match="are not its gradient"):
        attach(network(), "categorical")(*batch())


def test_a_rule_that_keeps_what_it_sees_is_refused(monkeypatch):
    """Its state is part of what is watched, as that of the network is."""
    seen = []

    def keeping(layer, record):
        def forward(x):
            seen.append(float(x.sum()))
            return right(x)

        right = rule(layer, record)
        return forward

    monkeypatch.setitem(_LAYERS, Scale, dataclasses.replace(registered(Scale(1)), rule=keeping))
    with pytest.raises(UnsupportedModel, match="changes its attribute"):
        attach(network(), "categorical")(*batch())


@pytest.mark.parametrize("place", ["class", "parameter", "attribute"])
def test_a_plain_layer_that_holds_more_than_before_is_refused(place, monkeypatch):
    """Its constructor is the user's, and runs again after the training."""

    def init(self, features, bias=True):
        ORIGINAL(self, features, bias)
        if len(BUILT) >= 9:  # after the network, its Gaussian version and the look before training
            match place:
                case "class":
                    Scale.kept = 1.0
                case "parameter":
                    self.more = nn.Parameter(torch.ones(1, device="cpu"))
                case "attribute":
                    self.more = torch.ones(1, device="cpu")
        BUILT.append(features)

    BUILT.clear()
    x, y = batch(60)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=60, batch_size=20, steps=2)
    monkeypatch.setattr(Scale, "kept", 0.0, raising=False)
    monkeypatch.setattr(Scale, "__init__", init)
    with pytest.raises(UnsupportedModel, match="of the posterior has another"):
        dpbnn.fit(network(), (x, y), "categorical", method=dpbnn.BBP(), plan=plan)
    assert len(BUILT) > 9


def test_another_class_of_the_same_name_is_refused():
    other = type("Scale", (nn.Module,), {"__module__": "elsewhere"})
    with pytest.raises(ValueError, match=r"toy_layer\.Scale has this name"):
        register(other)
    register(other, saved=None)
    assert describe(other()) is None


def test_the_library_does_not_name_it():
    source = Path(dpbnn.__file__).parent
    assert not [path for path in source.rglob("*.py") if "GaussianScale" in path.read_text()]
