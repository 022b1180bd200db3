"""Moments of ReLU networks: against autograd, quadrature and sampling."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.contributions import UnsupportedModel
from dpbnn.likelihoods import Categorical
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.moments import FactorContributions, Moments, NetworkMoments, Raw, Whitened
from dpbnn.moments.relu_network import _backward, _derivatives
from dpbnn.moments.sequential import SequentialNetwork
from dpbnn.posteriors.natural import propagate, rectified

NOISE = 0.3


def network(hidden=(6, 5), outputs=2, seed=0, **options):
    torch.manual_seed(seed)
    model = dpbnn.mlp(4, hidden, outputs).double()
    return NetworkMoments(model, GaussianNoise(NOISE), dpbnn.Gaussian(1.0), 50, **options)


def batch(count=7, outputs=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, outputs, generator=generator, dtype=torch.float64)


def derivatives(model, moments, x, y):
    """d log Z / dm and d log Z / dv of every weight and example, as `factors` takes them."""
    passes, m, v = model._forward(moments, x)
    found = {}
    for name, kept, by_mean, by_variance in _backward(passes, *model._head(m, v, y)):
        gradient, k = _derivatives(kept, by_mean, by_variance)
        found[name] = (gradient, (gradient.square() - k) / 2)
    return found


def log_normaliser(model, mean, variance, x, y):
    placed = {n: layer.at(mean[n], variance[n]) for n, layer in model.layers.items()}
    m, v = propagate(placed, x)
    total = v + NOISE**2
    return -0.5 * (torch.log(2 * math.pi * total) + (y - m).square() / total).sum(1)


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5), (4, 4, 4)])
def test_the_derivatives_are_those_of_autograd(hidden):
    model = network(hidden)
    q = model.start().moments()
    x, y = batch()
    ours = derivatives(model, q, x, y)
    for i in range(len(x)):
        mean = {n: v.clone().requires_grad_() for n, v in q.mean.items()}
        variance = {n: v.clone().requires_grad_() for n, v in q.covariance.items()}
        value = log_normaliser(model, mean, variance, x[i : i + 1], y[i : i + 1]).sum()
        exact = torch.autograd.grad(value, [*mean.values(), *variance.values()])
        for k, name in enumerate(mean):
            torch.testing.assert_close(ours[name][0][i], exact[k])
            torch.testing.assert_close(ours[name][1][i], exact[len(mean) + k])


@pytest.mark.parametrize("hidden", [(6,), (5, 4)])
def test_one_record_at_a_time_gives_the_same_derivatives(hidden):
    model = network(hidden, outputs=1)
    q = model.start().moments()
    x, y = batch(outputs=1)
    whole = derivatives(model, q, x, y)
    alone = SequentialNetwork([tuple(m.shape) for m in q.mean.values()], [True] * len(q.mean))
    mean, variance = (
        np.concatenate([v.numpy().reshape(-1) for v in part.values()])
        for part in (q.mean, q.covariance)
    )
    for i in range(len(x)):
        found = alone.tilted(mean, variance, x[i].numpy(), float(y[i, 0]), NOISE**2)
        slopes, curvatures = alone.layers(found.slope), alone.layers(found.curvature)
        for k, (gradient, by_variance) in enumerate(whole[name] for name in q.mean):
            np.testing.assert_allclose(slopes[k], gradient[i], rtol=1e-9, atol=1e-12)
            expected = gradient[i].square() - 2 * by_variance[i]
            np.testing.assert_allclose(curvatures[k], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("m", "v"), [(0.3, 0.5), (-1.0, 0.2), (2.0, 1e-3), (-4.0, 1.0), (0, 4)])
def test_a_rectified_gaussian_has_the_moments_of_quadrature(m, v):
    """1-D integral by Simpson's rule over 12 standard deviations, to 1e-6."""
    mean, variance = rectified(torch.tensor([m]).double(), torch.tensor([v]).double())
    a = np.linspace(m - 12 * math.sqrt(v), m + 12 * math.sqrt(v), 400_001)
    density = np.exp(-0.5 * (a - m) ** 2 / v) / math.sqrt(2 * math.pi * v)
    relu = np.maximum(a, 0)
    first = np.trapezoid(relu * density, a)
    second = np.trapezoid(relu**2 * density, a)
    assert mean.item() == pytest.approx(first, rel=1e-6, abs=1e-9)
    assert variance.item() == pytest.approx(second - first**2, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("m", "v"), [(1e6, 1e-3), (-1e6, 1e-3), (50.0, 1e-24), (0.0, 1e-24)])
def test_extreme_activations_stay_finite(m, v):
    mean, variance = rectified(torch.tensor([m]), torch.tensor([v]))
    assert mean.item() == pytest.approx(max(m, 0.0), rel=1e-6, abs=1e-9)
    assert 0 <= variance.item() <= 1.01 * v


def test_matched_moments_are_those_of_quadrature_on_one_weight():
    """A linear network with one weight: the tilted distribution integrated numerically, 1e-6."""
    layer = nn.Linear(1, 1, bias=False).double()
    model = NetworkMoments(nn.Sequential(layer), GaussianNoise(NOISE), dpbnn.Gaussian(1.0), 50)
    m, v, x, y = 0.4, 0.7, 0.6, 1.3  # the cap of v k is far away
    cavity = Moments({"0": torch.tensor([[m]]).double()}, {"0": torch.tensor([[v]]).double()})
    found = model.factors(cavity, torch.tensor([[x]]).double(), torch.tensor([[y]]).double())
    w = np.linspace(m - 14 * math.sqrt(v), m + 14 * math.sqrt(v), 2_000_001)
    density = np.exp(-0.5 * (w - m) ** 2 / v - 0.5 * (y - w * x) ** 2 / NOISE**2)
    density /= np.trapezoid(density, w)
    mean = np.trapezoid(w * density, w)
    variance = np.trapezoid((w - mean) ** 2 * density, w)
    curvature = found.curvature["0"].item()
    slope = found.slope["0"].item()
    assert 1 / (1 / v + curvature) == pytest.approx(variance, rel=1e-6)
    matched = (m / v + slope + curvature * m) * variance
    assert matched == pytest.approx(mean, rel=1e-6)


def test_propagated_moments_agree_with_sampling():
    """Output moments of a wide hidden layer against 40000 weight draws.

    The mean is exact up to sampling (4.5 standard errors: false alarm below 1e-4 in 10 inputs); the
    variance is propagated unit by unit, which is exact for one hidden layer.
    """
    model = network((20,), outputs=1)
    q = model.start().moments()
    x, _ = batch(10)
    placed = {n: layer.at(q.mean[n], q.covariance[n]) for n, layer in model.layers.items()}
    m, v = propagate(placed, x)
    generator = torch.Generator().manual_seed(0)
    count = 40_000
    z = x
    outputs = None
    for name, layer in model.layers.items():
        shape = (count, *q.mean[name].shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        w = layer.scale * (q.mean[name] + q.covariance[name].sqrt() * noise)
        z = torch.cat([z, torch.ones_like(z[..., :1])], -1)
        z = z.expand(count, *z.shape[-2:]) @ w.mT
        outputs = z
        z = z.relu()
    outputs = outputs[..., 0]
    assert ((outputs.mean(0) - m[:, 0]).abs() < 4.5 * (v[:, 0] / count).sqrt()).all()
    torch.testing.assert_close(outputs.var(0), v[:, 0], rtol=0.06, atol=0)


def test_one_example_takes_at_most_a_share_of_a_variance():
    model = network((6,), outputs=1)
    q = model.start().moments()
    x, y = batch(outputs=1)
    found = model.factors(q, 1e3 * x, 1e3 * y)
    for name, value in found.curvature.items():
        whitened = value * q.covariance[name]
        assert (whitened <= 0.8 / 0.2 + 1e-9).all()
        assert (whitened > -1 - 1e-9).all()


@pytest.mark.parametrize("kind", [Whitened, Raw])
@pytest.mark.parametrize("full", [False, True])
def test_coordinates_lead_there_and_back(kind, full):
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    root = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    covariance = root @ root.mT + torch.eye(3) if full else root[:, 0].square() + 0.1
    coordinates = kind(Moments({"a": mean}, {"a": covariance}), weight=2.0)
    factor = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)
    second = factor + factor.mT if full else factor[:, 0]
    natural = dpbnn.moments.Natural({"a": torch.randn(2, 3, generator=generator).double()},
                                    {"a": second})  # fmt: skip
    vectors = {n: v[0] for n, v in coordinates.vectors(coordinates.centred(natural)).items()}
    assert {n: v.shape for n, v in vectors.items()} == coordinates.shapes()
    back = coordinates.factor(vectors)
    torch.testing.assert_close(back.first["a"], natural.first["a"])
    torch.testing.assert_close(back.second["a"], second)
    if full and kind is Raw:
        assert (vectors["precision.a"] / 2).norm() == pytest.approx(second.norm())


def test_whitened_coordinates_do_not_depend_on_units():
    """Weights in other units have the same coordinates; raw ones do not."""
    model = network((6,), outputs=1)
    q = model.start().moments()
    x, y = batch(outputs=1)
    factors = model.factors(q, x, y)
    unit = 7.0
    other = Moments(
        {n: unit * v for n, v in q.mean.items()}, {n: unit**2 * v for n, v in q.covariance.items()}
    )
    scaled = dpbnn.moments.Factors(
        {n: v / unit for n, v in factors.slope.items()},
        {n: v / unit**2 for n, v in factors.curvature.items()},
    )
    ours, theirs = Whitened(q).vectors(factors), Whitened(other).vectors(scaled)
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value)
    ours, theirs = Raw(q).vectors(factors), Raw(other).vectors(scaled)
    assert not torch.allclose(ours["mean.1"], theirs["mean.1"])


def test_contributions_do_not_depend_on_chunks_and_answer_the_contract():
    model = network((6,), outputs=1)
    q = model.start().moments()
    x, y = batch(9, outputs=1)
    x[4] = math.nan
    coordinates = Whitened(q)
    offset = {n: torch.full(s, 0.01).double() for n, s in coordinates.shapes().items()}
    whole = FactorContributions(model, coordinates, offset, x, y)
    parts = FactorContributions(model, coordinates, offset, x, y, 2)
    assert len(list(parts.chunks())) == 5
    torch.testing.assert_close(parts.norms(), whole.norms())
    assert whole.norms()[4] == 0
    w = torch.arange(9).double()
    for name, value in whole.weighted_sum(w).items():
        torch.testing.assert_close(parts.weighted_sum(w)[name], value)
    gram = whole.gram()
    torch.testing.assert_close(parts.gram(), gram)
    torch.testing.assert_close(gram.diagonal().sqrt(), whole.norms(), rtol=1e-3, atol=1e-9)
    empty = FactorContributions(model, coordinates, offset, x[:0], y[:0])
    assert empty.norms().shape == (0,)
    assert empty.gram().shape == (0, 0)


@pytest.mark.parametrize("heat", [1.0, 5.0])
def test_the_noises_coordinate_is_the_derivative_by_its_logarithm(heat):
    torch.manual_seed(0)
    net = dpbnn.mlp(4, (6,), 1).double()
    model = NetworkMoments(net, GaussianNoise(None), dpbnn.Gaussian(1.0), 50, noise_start=0.4)
    model, cold = model.at(heat * 0.4), model
    q = model.start().moments()
    x, y = batch(outputs=1)
    log_noise = torch.tensor(math.log(0.4), dtype=torch.float64, requires_grad=True)
    placed = {n: layer.at(q.mean[n], q.covariance[n]) for n, layer in model.layers.items()}
    m, v = propagate(placed, x)
    total = v + heat * log_noise.exp()
    value = -0.5 * (torch.log(total) + (y - m).square() / total)
    (exact,) = torch.autograd.grad(value.sum(), log_noise)
    found = model.factors(q, x, y).extra["noise"].sum() / math.sqrt(2 / 50)
    torch.testing.assert_close(found, exact.detach())
    moved = cold.moved_noise({"noise": torch.tensor(0.1)}, step=0.5)
    assert moved == pytest.approx(0.4 * math.exp(0.5 * 50 * math.sqrt(2 / 50) * 0.1))


def test_an_example_does_not_see_another():
    model = network((6,), outputs=1)
    q = model.start().moments()
    x, y = batch(outputs=1)
    before = model.factors(q, x, y)
    x[0], y[0] = 100.0, -100.0
    after = model.factors(q, x, y)
    for name in before.slope:
        assert torch.equal(before.slope[name][1:], after.slope[name][1:])
        assert torch.equal(before.curvature[name][1:], after.curvature[name][1:])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), r"1 is Tanh.*ReLU"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), "1 is Linear"),
        (nn.Sequential(nn.Conv1d(4, 3, 1)), "0 is Conv1d"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "end in a Linear"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3)), "2 is BatchNorm1d"),
    ],
)
def test_other_networks_are_refused_by_the_name_of_the_module(model, message):
    with pytest.raises(ValueError, match=message):
        NetworkMoments(model, GaussianNoise(NOISE), dpbnn.Gaussian(1.0), 50)


def test_other_likelihoods_and_priors_are_refused():
    model = dpbnn.mlp(4, (3,), 1)
    with pytest.raises(UnsupportedModel, match="Gaussian targets"):
        NetworkMoments(model, Categorical(), dpbnn.Gaussian(1.0), 50)
    with pytest.raises(UnsupportedModel, match="prior=Laplace"):
        NetworkMoments(model, GaussianNoise(1.0), dpbnn.Laplace(1.0), 50)
