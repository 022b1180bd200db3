"""Langevin methods on targets whose law is known."""

import math

import pytest
import torch
from stepping import step
from torch import nn

import dpbnn
from dpbnn.likelihoods import Categorical
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.method import Problem
from dpbnn.privacy.noise import NoiseSource

N, COPIES, NOISE, PRIOR = 20, 3000, 0.5, dpbnn.Gaussian(2.0)
PRECISION = N / NOISE**2 + 1 / 4


def target():
    """n records that each see all coordinates: the posterior is N(mean, 1/PRECISION) in each."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(N, COPIES, generator=generator)
    return torch.ones(N, 1), y, y.sum(0) / NOISE**2 / PRECISION


def sample(method, steps, *, private, keep):
    """Run a chain and return the stored iterates [keep, COPIES]."""
    x, y, mean = target()
    model = nn.Linear(1, COPIES, bias=False)
    with torch.no_grad():
        model.weight.copy_(mean[:, None])
    clip = 1e4 if private else math.inf
    sigmas = method.noise_multipliers(N, N, steps, clip) if private else [0.0] * steps
    problem = Problem(model, GaussianNoise(NOISE), PRIOR, N, N, steps, private)
    process = method.start(problem)
    gate = dpbnn.Gate(clip, sigmas[0], dpbnn.FullBatch(N))
    gate.reserve(steps)
    states, state = [], process.begin()
    for made in range(steps):
        state = step(process, state, gate, x, y)
        if made >= steps - keep:
            states.append(model.weight.detach()[:, 0].clone())
    return torch.stack(states), mean


SGLD_STEP = 0.1 / PRECISION


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("convention", ["half-step", "paper"])
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_sgld_has_the_targets_mean_and_variance_at_its_temperature(private, convention, tau):
    """The discretised chain has variance tau / (precision (1 - a precision/2)).

    Of 3000 chains, whose estimate has a relative standard error of 0.01: 6 % is six of them.
    """
    rate = SGLD_STEP * (2 if convention == "half-step" else 1)
    method = dpbnn.SGLD(learning_rate=rate, temperature=tau, convention=convention)
    states, mean = sample(method, 150, private=private, keep=60)
    variance = (states - mean).square().mean()
    expected = tau / (PRECISION * (1 - 0.1 / 2))
    assert float(variance) == pytest.approx(expected, rel=0.06)
    assert float(variance) != pytest.approx(expected / 2, rel=0.06)
    offset = (states.mean(0) - mean).mean()
    assert abs(float(offset)) < 5 * math.sqrt(expected / COPIES)


@pytest.mark.parametrize("private", [False, True])
def test_sghmc_has_the_targets_variance(private):
    method = dpbnn.SGHMC(learning_rate=0.01 / PRECISION, friction=0.2)
    states, mean = sample(method, 250, private=private, keep=100)
    variance = float((states - mean).square().mean())
    assert variance == pytest.approx(1 / PRECISION, rel=0.1)
    assert variance != pytest.approx(0.5 / PRECISION, rel=0.1)


@pytest.mark.parametrize("convention", ["half-step", "paper"])
def test_theorem_1_sgld_and_its_equivalent_sgd_have_the_same_iterates(convention):
    x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
    prior, n, eta, clip = dpbnn.Gaussian(0.5), 40, 1e-3, 0.5
    sgld = dpbnn.SGLD(learning_rate=eta, clip=clip, convention=convention)
    same = dpbnn.sgd_equivalent(eta, clip, n, 10, sgld.temperature, convention)
    sgd = dpbnn.SGD(learning_rate=same.learning_rate, clip=clip)
    weights = []
    for method in (sgld, sgd):
        torch.manual_seed(0)
        model = dpbnn.mlp(6, (5,), 3)
        likelihood = Categorical()
        process = method.start(Problem(model, likelihood, prior, n, 10, 8, True))
        draw = dpbnn.Poisson(n, 10)
        gate = dpbnn.Gate(clip, same.noise_multiplier, draw, noise=NoiseSource.seeded(3))
        state = process.begin()
        for batch in draw.batches(8, key=b"the same batches"):
            state = step(process, state, gate, x[batch], y[batch])
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)
    assert sgld.noise_multipliers(n, 10, 1)[0] == pytest.approx(same.noise_multiplier)


@pytest.mark.parametrize(
    "method",
    [
        dpbnn.SGLD(learning_rate=3e-4, temperature=0.7),
        dpbnn.SGLD.paper(learning_rate=1e-4, clip=None),
        dpbnn.SGHMC(learning_rate=2e-4, friction=0.3, temperature=2.0),
        dpbnn.SGLD(learning_rate=dpbnn.cyclical(3e-4, 2, 12)),
    ],
)
def test_item_22_sigma_recomputed_from_the_update_is_the_ledgers(method):
    """The injected std over what one clipped record can move a step by, at every step."""
    x, y = torch.randn(50, 4), torch.randint(0, 2, (50,))
    given = dpbnn.plan(epsilon=2.0, delta=1e-5, n=50, batch_size=10, steps=12)
    _, clip = method.settled(given)
    ledger = dpbnn.Ledger()
    dpbnn.fit(nn.Linear(4, 2), (x, y), "categorical", dpbnn.Flat(), method, given, ledger=ledger)
    recorded = [e.noise_multiplier for e in ledger.events for _ in range(e.count)]
    assert ledger.epsilon(1e-5) <= given.epsilon * (1 + 1e-6)

    model = nn.Linear(4, 2)
    problem = Problem(model, Categorical(), dpbnn.Flat(), 50, 10, 12, True)
    process = method.start(problem)
    state = process.begin()
    for made, sigma in enumerate(recorded):
        before = model.weight.detach().clone()
        for velocity in state.velocity.values():
            velocity.zero_()
        zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        zero["weight"][0, 0] = clip
        state = process.update(state, zero)
        one_record = float((model.weight.detach() - before).norm())
        eta = method.rate(made)
        if isinstance(method, dpbnn.SGHMC):
            injected = math.sqrt(2 * method.friction * eta * method.temperature)
        else:
            injected = math.sqrt(2 * method.drift * eta * method.temperature)
        assert injected / one_record == pytest.approx(sigma, rel=1e-3)


def test_item_23_chains_are_paid_for_and_predictions_are_free():
    x, y = torch.randn(60, 4), torch.randint(0, 2, (60,))
    given = dpbnn.plan(epsilon=3.0, delta=1e-5, n=60, batch_size=12, steps=10)
    ledger = dpbnn.Ledger()
    method = dpbnn.SGLD(learning_rate=1e-3, chains=3, keep=4)
    posterior = dpbnn.fit(
        dpbnn.mlp(4, (5,), 2),
        (x, y),
        "categorical",
        dpbnn.Gaussian(1.0),
        method,
        given,
        ledger=ledger,
    )
    assert ledger.releases == 30
    assert ledger.epsilon(1e-5) <= 3.0
    assert len(posterior.iterates) == 12
    posterior.predict(x, samples=12)
    assert ledger.releases == 30


def test_three_that_disagree_are_an_error_and_two_solve_for_the_third():
    given = dpbnn.plan(epsilon=1.0, delta=1e-5, n=1000, batch_size=50, epochs=2)
    _, clip = dpbnn.SGLD(learning_rate=1e-5).settled(given)
    expected = dpbnn.sgld_clip(given.noise_multiplier, 1e-5, 1000, 50)
    assert clip == pytest.approx(expected)
    with pytest.raises(ValueError, match="leave the clip out"):
        dpbnn.SGLD(learning_rate=1e-5, clip=2 * clip).settled(given)
    plan, same = dpbnn.SGLD(learning_rate=1e-5, clip=clip / 2).settled(given)
    assert same == clip / 2
    assert plan.epsilon < given.epsilon


def test_a_schedule_keeps_the_clip_and_changes_sigma():
    given = dpbnn.plan(epsilon=1.0, delta=1e-5, n=1000, batch_size=50, steps=40)
    method = dpbnn.SGLD(learning_rate=dpbnn.cyclical(1e-4, 2, 40))
    plan, clip = method.settled(given)
    assert 0.99 <= plan.epsilon / given.epsilon <= 1
    sigmas = [s for s, count in plan.noise_multipliers for _ in range(count)]
    assert sigmas == pytest.approx(method.noise_multipliers(1000, 50, 40, clip))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"keep": 0}, "keep=0"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"convention": "full"}, "convention='full'"),
    ],
)
def test_bad_settings_say_so(settings, message):
    with pytest.raises(ValueError, match=message):
        dpbnn.SGLD(**settings)


def test_a_step_size_that_vanishes_is_refused():
    given = dpbnn.plan(epsilon=1.0, delta=1e-5, n=1000, batch_size=50, steps=4)
    with pytest.raises(ValueError, match="at step 2"):
        dpbnn.SGLD(learning_rate=lambda t: 1e-4 if t < 2 else 0.0).settled(given)


def measured_temperature(method, plan):
    torch.manual_seed(0)
    x = torch.randn(plan.n, 4)
    y = x.sum(1) + torch.randn(plan.n)
    model = nn.Linear(4, 1)
    likelihood = GaussianNoise(1.0)
    posterior = dpbnn.fit(model, (x, y), likelihood, method=method, plan=plan, debug_seed=1)
    model = posterior.model.requires_grad_(True)
    found = dpbnn.contributions(model, likelihood, x, y[:, None])
    squares = found.norms().square().mean() / 5
    return posterior.settings["measured_temperature"], float(squares)


@pytest.mark.parametrize("tau", [1.0, 0.5])
@pytest.mark.parametrize("kind", [dpbnn.SGLD, dpbnn.SGHMC])
def test_the_measured_temperature_is_the_setting_where_every_step_sees_all_rows(kind, tau):
    """600 differences of 5 numbers: a relative standard error of 0.03."""
    method = kind(learning_rate=1e-5, temperature=tau)
    for plan in (
        dpbnn.plan(epsilon=1.0, delta=1e-5, n=500, steps=2400, sampling="full-batch"),
        dpbnn.open_plan(n=500, steps=2400, sampling="full-batch"),
    ):
        assert measured_temperature(method, plan)[0] == pytest.approx(tau, rel=0.15)


def test_the_measured_temperature_has_the_noise_of_the_batches():
    """Batches add a eta n^2 (1 - q) E[g^2] / (2 b) to the temperature, g of one weight."""
    n, b, eta = 2000, 20, 5e-5
    plan = dpbnn.open_plan(n=n, batch_size=b, steps=2000)
    found, squares = measured_temperature(dpbnn.SGLD(learning_rate=eta), plan)
    added = 0.5 * eta * n**2 * (1 - b / n) * squares / (2 * b)
    assert added > 1
    assert found == pytest.approx(1 + added, rel=0.2)


def test_caveats_say_what_the_posterior_leaves_out():
    plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=100, steps=100, sampling="full-batch")
    free = dpbnn.open_plan(n=100, steps=100, sampling="full-batch")
    prior = dpbnn.Gaussian(1.0)
    for method in (dpbnn.VI(), dpbnn.BBP(), dpbnn.SGD(), dpbnn.MCDropout(), dpbnn.SEP()):
        assert "leaves out the privacy noise and the clip" in method.caveats(plan, prior)[0]
        assert method.caveats(free, prior) == ()
    assert dpbnn.NoiseAware().caveats(plan, prior) == ()
    slow, fast = dpbnn.SGLD(learning_rate=1e-3), dpbnn.SGLD(learning_rate=0.02)
    assert "moves a weight by 0.32 at most" in slow.caveats(free, prior)[0]
    assert fast.caveats(free, prior) == ()
    assert slow.caveats(free, dpbnn.Gaussian(0.1)) == ()
    assert len(slow.caveats(plan, prior)) == 2
    four = dpbnn.SGLD(learning_rate=0.02, chains=4)
    assert "a chain of 25 steps" in four.caveats(free, prior)[0]
    data = torch.rand(100, 2), torch.arange(100) % 2
    posterior = dpbnn.fit(nn.Linear(2, 2), data, method=slow, plan=plan)
    assert posterior.caveats == slow.caveats(slow.settled(plan)[0], prior)
