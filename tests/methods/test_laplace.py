"""Bands of SGD: the precision is the closed form, bands cover the truth, and no data is seen."""

import functools
import math

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import Categorical, Gaussian, LearnedNoiseGaussian, classes, gaussian
from dpbnn.methods import Problem, laplace
from dpbnn.methods.sgd import PathProcess
from dpbnn.posteriors import IteratePosterior, LaplacePosterior

N, STD, WIDE = 500, 0.5, dpbnn.Gaussian(1e3)


def inputs(count, columns=3):
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(4))


def problem(model, likelihood, *, n=N, sigma=None, steps=10, prior=WIDE):
    sigmas = () if sigma is None else (sigma,) * steps
    return Problem(model, likelihood, prior, n, n, steps, sigma is not None, sigmas=sigmas)


def linear(outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(3, outputs)


def told(model, likelihood, clip=1e6, **more):
    """Return the directions of the last layer, or of all, and the problem."""
    settled = problem(model, likelihood, **more)
    found = {}

    def keep(original, directions, first):
        found["all"] = directions
        return original(directions, first)

    with pytest.MonkeyPatch.context() as patch:
        original = laplace._prior_variance
        patch.setattr(laplace, "_prior_variance", lambda d, f: keep(original, d, f))
        laplace.deviations(model, settled, clip, inputs)
    part = found["all"][-1]
    return part, settled


def basis(part):
    """Return the directions, one a row, in the units of the weights of the only layer."""
    eye = torch.eye(part.told.numel()).double().unflatten(1, part.told.shape)
    (found,) = part.back(eye).values()
    return found.flatten(1)


def precision(part):
    return basis(part).T @ torch.diag(part.told.flatten()) @ basis(part)


def joined(x):
    return torch.cat([x, torch.ones(len(x), 1)], 1).double()


@pytest.fixture(params=["together", "apart"])
def both_ways(request, monkeypatch):
    """Small networks are taken together; a single layer must come out the same either way."""
    if request.param == "apart":
        monkeypatch.setattr(laplace, "_JOINT", 0)


@pytest.mark.usefixtures("both_ways")
def test_without_privacy_it_is_the_precision_of_a_linear_regression():
    part, _ = told(linear(), Gaussian(STD))
    a = joined(inputs(laplace._POINTS))
    exact = N * a.T @ a / len(a) / STD**2
    torch.testing.assert_close(precision(part), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("both_ways")
def test_with_privacy_noise_it_is_that_of_noised_scores():
    """Information (V + s^2)^-1 H^2 with H = V = n E[aa']/STD^2, and s the noise of the average."""
    sigma, steps, clip = 20.0, 10, 1e6
    part, _ = told(linear(), Gaussian(STD), clip, sigma=sigma, steps=steps)
    a = joined(inputs(laplace._POINTS))
    h = N * a.T @ a / len(a) / STD**2
    noise = (sigma * clip) ** 2 / steps
    exact = h @ torch.linalg.solve(h + noise * torch.eye(4).double(), h)
    scale = float(exact.abs().max())
    torch.testing.assert_close(precision(part), exact, rtol=1e-6, atol=1e-6 * scale)


def spread(drawn, model, x):
    """Return the mean variance of the function over inputs, for draws of the weights."""
    names = list(drawn)
    at = {name: value.double() for name, value in model.double().named_parameters()}

    def moved(*moves):
        along = dict(zip(names, moves, strict=True))
        run = functools.partial(torch.func.functional_call, model, args=(x,))
        return torch.func.jvp(run, (at,), (along,))[1]

    away = torch.func.vmap(moved)(*[drawn[name].double() for name in names])
    return float(away.detach().var(0).mean())


@pytest.mark.parametrize("apart", [False, True])
def test_layers_that_can_say_the_same_are_counted_once(monkeypatch, apart):
    """A function of k free numbers has variance k STD^2/n. Broken twin: every layer by itself."""
    if apart:
        monkeypatch.setattr(laplace, "_JOINT", 0)
    monkeypatch.setattr(laplace, "DRAWS", 4000)
    monkeypatch.setattr(gaussian, "_WIDER", (1.0, 1.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(0.7)
    drawn = laplace.deviations(model, problem(model, Gaussian(STD), n=10**6), 1e6, inputs)
    found = spread(drawn, model, inputs(laplace._POINTS).double()) / (4 * STD**2 / 10**6)
    assert found == pytest.approx(1.0, abs=0.15) or apart
    assert (found > 1.4) == apart


@pytest.mark.parametrize("apart", [False, True])
def test_a_clip_takes_information_away(monkeypatch, apart):
    """All gradients have length 0.1 then: H = n E[c r s aa'], apart as a product of means."""
    if apart:
        monkeypatch.setattr(laplace, "_JOINT", 0)
    clip = 0.1
    model = linear()
    part, _ = told(model, Gaussian(STD), clip, sigma=1e-9)
    x = inputs(laplace._POINTS).double()
    a, model = joined(x), model.double()
    outcomes = Gaussian(STD).outcomes(model(x).detach())
    slopes = outcomes.slopes[..., 0]
    norms = slopes.abs() * a.norm(dim=1)
    factor = (clip / norms.clamp(min=1e-30)).clamp(max=1)
    h, v = (N * (outcomes.chances * factor**k * slopes**2).sum(0) for k in (1, 2))
    if apart:
        h, v = (weight.mean().expand(len(a)) for weight in (h, v))
    hessian, lost = (a.T @ (weight[:, None] * a) / len(a) for weight in (h, v))
    values = torch.linalg.eigvalsh(hessian) * hessian.trace() / lost.trace()
    found = part.told.flatten().sort().values
    torch.testing.assert_close(found, values, rtol=1e-3, atol=0)
    free, _ = told(linear(), Gaussian(STD))
    assert (found < free.told.flatten().sort().values).all()


@pytest.mark.usefixtures("both_ways")
@pytest.mark.parametrize("wrong", [False, True])
def test_draws_have_the_stated_covariance(monkeypatch, wrong):
    """6 standard errors of 20 000 draws; draws that forget the factor must be seen."""
    monkeypatch.setattr(laplace, "DRAWS", 40_000)
    model = linear()
    settled = problem(model, Gaussian(STD))
    part, _ = told(model, Gaussian(STD))
    factor = gaussian._WIDER[1]
    monkeypatch.setattr(gaussian, "_WIDER", (1.0, 1.0) if wrong else gaussian._WIDER)
    drawn = laplace.deviations(model, settled, 1e6, inputs)
    assert drawn["weight"].shape == (40_000, 1, 3)
    assert drawn["bias"].shape == (40_000, 1)
    both = torch.cat([drawn["weight"][:, 0], drawn["bias"]], 1).double()
    assert both.mean(0).abs().max() < 1e-6
    along = both @ basis(part).T
    expected = factor**2 / part.told.flatten()
    error = (along.square().mean(0) / expected - 1).abs().max()
    assert (error > 6 * math.sqrt(2 / 20_000)) == wrong


@pytest.mark.parametrize("apart", [False, True])
def test_two_classes_know_the_difference_of_their_logits(monkeypatch, apart):
    """It has the precision of a logistic regression, n E[p (1 - p) aa'], apart a product."""
    if apart:
        monkeypatch.setattr(laplace, "_JOINT", 0)
    model = linear(2)
    settled = problem(model, Categorical())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(laplace, "DRAWS", 20_000)
        patch.setattr(classes, "_WIDER", (1.0, 1.0))
        drawn = laplace.deviations(model, settled, 1e6, inputs)
    x = inputs(laplace._POINTS)
    chance = model(x).softmax(-1)[:, 1].detach().double()
    a = joined(x)
    weight = (chance * (1 - chance))[:, None]
    exact = torch.linalg.inv(N * a.T @ ((weight.mean() if apart else weight) * a) / len(a))
    both = torch.cat([drawn["weight"], drawn["bias"][..., None]], 2).double()
    apart = both[:, 1] - both[:, 0]
    found = apart.T @ apart / len(apart)
    ratio = found.diagonal() / exact.diagonal()
    assert (ratio - 1).abs().max() < 0.1


def test_a_learned_noise_has_the_information_of_its_size():
    model = nn.Sequential(linear(), dpbnn.networks.LearnedNoise(1, log_variance=2 * math.log(STD)))
    part, _ = told(model, LearnedNoiseGaussian())
    fixed, _ = told(linear(), Gaussian(STD))
    torch.testing.assert_close(part.told, fixed.told, rtol=1e-5, atol=0)


def sizes(**more):
    torch.manual_seed(0)
    model = dpbnn.mlp(3, (4,), 2)
    drawn = laplace.deviations(model, problem(model, Categorical(), **more), 1.0, inputs)
    return float(sum(d.square().sum() for d in drawn.values()))


@pytest.mark.parametrize("wrong", [False, True])
def test_directions_of_which_nothing_is_told_may_turn(monkeypatch, wrong):
    """As they do with rounding, on other ranks. Broken twin: draws along the directions."""
    torch.manual_seed(0)
    model = dpbnn.mlp(3, (4,), 2)
    if wrong:
        made = laplace.Directions
        monkeypatch.setattr(
            laplace, "Directions", lambda t, m, _, back: made(t, m, torch.clone, back)
        )
    before = laplace.deviations(model, problem(model, Categorical(), sigma=3.0), 1.0, inputs)
    original = torch.linalg.eigh

    def turned(matrix):
        values, basis = original(matrix)
        null = values < 1e-9 * values.max()
        assert null.sum() > 3
        turn = torch.linalg.qr(torch.randn(int(null.sum()), int(null.sum())).double())[0]
        basis[:, null] = basis[:, null] @ turn
        return values, basis

    monkeypatch.setattr(torch.linalg, "eigh", turned)
    after = laplace.deviations(model, problem(model, Categorical(), sigma=3.0), 1.0, inputs)
    far = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert (far > 1e-3) == wrong


def test_noise_widens_and_records_narrow():
    noisy = [sizes(sigma=sigma) for sigma in (0.1, 3.0, 30.0, 300.0)]
    assert noisy == sorted(noisy)
    assert noisy[0] < noisy[-1]
    many = [sizes(sigma=3.0, n=n) for n in (100, 1000, 10_000)]
    assert many == sorted(many, reverse=True)


def test_a_users_prior_bounds_it():
    assert sizes(sigma=1e4, prior=dpbnn.Gaussian(0.01)) < sizes(sigma=1e4)
    assert sizes(prior=dpbnn.Gaussian(0.01)) == sizes()  # without privacy data may have chosen it


def test_the_prior_variance_goes_to_what_was_learned():
    """With much information it is the mean square of the moves, with none the first value."""
    moved = torch.tensor([[0.1, -0.2, 0.3]]).double()

    def learned(precision):
        part = laplace.Directions(
            torch.full((1, 3), precision), moved, lambda w: w, lambda moves: {}
        )
        return laplace._prior_variance([part] * 1000, 0.1)

    assert learned(1e9) == pytest.approx(float(moved.square().mean()), rel=0.02)
    assert learned(0.0) == pytest.approx(0.1)


def trained(method, seed=0, n=400, epsilon=1.0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(3, 2, generator=generator)
    x = torch.rand(n + 50, 2, generator=generator) * 2 - 1
    truth = (torch.cat([x, torch.ones(len(x), 1)], 1) @ weights).softmax(1)[:, 1]
    y = (torch.rand(n, generator=generator) < truth[:n]).long()
    plan = dpbnn.plan(epsilon=epsilon, delta=1e-5, n=n, steps=100, sampling="full-batch")

    def start():
        model = dpbnn.mlp(2, (), 2)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model

    posterior = dpbnn.fit(
        start, (x[:n], y), "categorical", dpbnn.Gaussian(1.0), method, plan, debug_seed=seed
    )
    return posterior, x[n:], truth[n:]


def uniform(count):
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1


PATH = {"learning_rate": 0.05, "clip": 1.0, "optimizer": "adam", "schedule": "linear", "keep": 10}


def coverage(share=1.0):
    """Return how often 90 % bands of a linear classifier hold the truth at epsilon 1."""
    held = []
    for seed in range(12):
        posterior, x, truth = trained(dpbnn.SGD(**PATH, inputs=uniform), seed)
        posterior.deviations = {n: share * d for n, d in posterior.deviations.items()}
        found = posterior.predict(x).probabilities[..., 1]
        low, high = torch.quantile(found, torch.tensor([0.05, 0.95]), dim=0)
        held.append(((low <= truth) & (truth <= high)).float().mean())
    return float(torch.stack(held).mean())


def test_bands_cover_and_narrow_ones_do_not():
    assert coverage() > 0.8
    assert coverage(0.2) < 0.6


def test_iterates_are_those_of_the_same_training_without_bands():
    posterior, x, _ = trained(dpbnn.SGD(**PATH, inputs=uniform))
    plain, _, _ = trained(dpbnn.SGD(**PATH))
    assert type(posterior) is LaplacePosterior
    assert type(plain) is IteratePosterior
    assert torch.equal(posterior.predict(x).mean, plain.predict(x).mean)
    assert posterior.privacy.epsilon == plain.privacy.epsilon
    assert any("leaves out the privacy noise" in caveat for caveat in plain.caveats)
    assert not any("leaves out the privacy noise" in caveat for caveat in posterior.caveats)


def test_bands_are_a_function_of_the_released_weights_alone(monkeypatch):
    """Two trainings on other data that release the same have the same bands."""
    released = {"1.weight": torch.ones(2, 2), "1.bias": torch.zeros(2)}
    update = PathProcess.update
    monkeypatch.setattr(
        PathProcess, "update", lambda self, state, release: update(self, state, released)
    )
    first, second = (
        trained(dpbnn.SGD(**PATH, inputs=uniform), seed)[0].deviations for seed in (0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("model", "likelihood", "given", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), "categorical",
         inputs, r"'1\.weight' is in another one"),
        (lambda: nn.Linear(3, 2), "categorical", lambda count: torch.zeros(count, 5),
         "must be a function of a number"),
        (lambda: nn.Linear(3, 2), "categorical", 5, "inputs=5: must be a function"),
        (lambda: nn.Linear(3, 1), "poisson", inputs, "Poisson has none"),
        (lambda: nn.Linear(3, 4), "gaussian", inputs, "Gaussian has none"),
        (lambda: nn.Sequential(nn.Unflatten(1, (3, 1)), nn.Linear(1, 2), nn.Flatten(),
                               nn.Linear(6, 2)), "categorical", inputs, "sees several positions"),
        (lambda: nn.Sequential(*[shared := nn.Linear(3, 3), shared, nn.Linear(3, 2)]),
         "categorical", inputs, "sees several positions"),
    ],
)  # fmt: skip
def test_what_has_no_bands_is_refused_before_anything_is_spent(model, likelihood, given, message):
    ledger = dpbnn.Ledger()
    y = {"categorical": torch.arange(20) % 2, "poisson": torch.ones(20, 1)}
    data = inputs(20), y.get(likelihood, torch.zeros(20, 4))
    plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=20, sampling="full-batch", steps=4)
    method = dpbnn.SGD(keep=2, inputs=given)
    with pytest.raises((UnsupportedModel, ValueError), match=message):
        dpbnn.fit(model, data, likelihood, dpbnn.Gaussian(1.0), method, plan, ledger=ledger)
    assert ledger.releases == 0


def test_bands_need_iterates():
    with pytest.raises(ValueError, match="keep=25"):
        dpbnn.SGD(inputs=inputs)


def test_large_networks_are_refused(monkeypatch):
    monkeypatch.setattr(laplace, "LARGEST", 5)
    with pytest.raises(UnsupportedModel, match="8 weights"):
        laplace.check(problem(linear(2), Categorical()), inputs)


def test_wide_layers_take_their_inputs_for_uncorrelated(monkeypatch):
    """On inputs that are uncorrelated that changes little."""
    monkeypatch.setattr(laplace, "_JOINT", 0)
    close, _ = told(linear(), Gaussian(STD))
    monkeypatch.setattr(laplace, "_DENSE", 2)
    wide, _ = told(linear(), Gaussian(STD))
    assert torch.equal(basis(wide), torch.eye(4).double())
    ratio = wide.told.sort().values / close.told.sort().values
    assert (ratio - 1).abs().max() < 0.15
