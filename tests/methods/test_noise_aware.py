"""NoiseAware: the model of the release is the gate's, the chains sample it, and bands cover."""

import dataclasses
import math

import pytest
import torch

import dpbnn
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import Categorical, Gaussian
from dpbnn.methods import Problem
from dpbnn.methods.state import flat, restored
from dpbnn.methods.surrogate import Surrogate, annealed_chains, with_moments

SMALL = {"points": 100, "chains": 4, "iterations": 40, "keep": 8}


def started(settings, *, n=60, steps=4, private=True, noise_std=0.0, hidden=(3,), std=1.0):
    torch.manual_seed(1)
    model = dpbnn.mlp(2, hidden, 3)
    sigmas = (noise_std / settings.clip,) * steps
    problem = Problem(
        model, Categorical(), dpbnn.Gaussian(std), n, n, steps, private, sigmas=sigmas
    )
    process = settings.start(problem)
    return process, process.begin()


def test_the_modelled_release_is_the_gates_for_data_that_are_the_public_inputs():
    """A data set of all public inputs with every label, weighted by p_w, has the modelled mean."""
    clip = 0.4
    process, state = started(dpbnn.NoiseAware(clip=clip, **SMALL, rounds=2), std=0.7, steps=5)
    weights = torch.randn_like(state.anchor)
    at = weights.clone()
    process._place(state.parameters, at)
    chances = process._outputs(weights, state.inputs).softmax(-1)
    expected = torch.zeros_like(state.anchor)
    for label in range(3):
        y = torch.full((len(state.inputs),), label)
        found = dpbnn.contributions(process.model, Categorical(), state.inputs, y)
        factors = (clip / found.norms()).clamp(max=1) * chances[:, label].double()
        expected += process._flat(found.weighted_sum(factors.float()))
    # what was placed is where the features are taken, whatever the release is
    zero = {name: torch.zeros(shape) for name, shape in process.shapes.items()}
    state = dataclasses.replace(state, steps=process.first)
    state = process.update(process.update(state, zero), zero)
    scale = process.problem.n / len(state.inputs) * 0.7
    modelled = chances.flatten() @ state.features / state.weight
    torch.testing.assert_close(modelled, expected * scale, rtol=1e-3, atol=1e-3)


def test_chains_sample_a_gaussian():
    """Outcomes linear in the weights have a known posterior; 16 chains of 300 draws are near it."""
    torch.manual_seed(2)
    design, features = torch.randn(6, 3) * 2, torch.randn(6, 3)
    slope = design.T @ features
    release = torch.tensor([1.0, -2.0, 0.5])
    surrogate = Surrogate(lambda w: w @ design.T, features, release, slope @ slope.T)
    drawn = annealed_chains(surrogate, 16, 400, 300, 5, torch.Generator().manual_seed(3)).flatten(
        0, 1
    )
    precision = torch.eye(3) + slope @ slope.T
    covariance = torch.linalg.inv(precision)
    mean = covariance @ slope @ release
    error = (drawn.mean(0) - mean) / covariance.diagonal().sqrt()
    assert error.abs().max() < 0.15
    ratio = drawn.var(0) / covariance.diagonal()
    assert ratio.min() > 0.8
    assert ratio.max() < 1.25


def coverage(modelled_noise: float) -> float:
    """Return how often 90 % bands of a linear classifier hold the truth at epsilon 0.3."""
    held = []
    n = 400
    plan = dpbnn.plan(epsilon=0.3, delta=1e-5, n=n, steps=5, sampling="full-batch")
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(3, 2, generator=generator)
        x = torch.rand(n + 50, 2, generator=generator) * 2 - 1
        truth = (torch.cat([x, torch.ones(len(x), 1)], 1) @ weights).softmax(1)[:, 1]
        y = (torch.rand(n, generator=generator) < truth[:n]).long()
        method = Wrong(clip=1.0, rounds=4, **SMALL, modelled=modelled_noise)
        posterior = dpbnn.fit(
            dpbnn.mlp(2, (), 2), (x[:n], y), "categorical", dpbnn.Gaussian(1.0), method, plan,
            debug_seed=seed,
        )  # fmt: skip
        found = posterior.predict(x[n:]).probabilities[..., 1]
        low, high = torch.quantile(found, torch.tensor([0.05, 0.95]), dim=0)
        held.append(((low <= truth[n:]) & (truth[n:] <= high)).float().mean())
    return float(torch.stack(held).mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrong(dpbnn.NoiseAware):
    """Takes the privacy noise for `modelled` times what it is; 1 is right."""

    modelled: float = 1.0

    def start(self, problem):
        return super().start(
            dataclasses.replace(problem, sigmas=[s * self.modelled for s in problem.sigmas])
        )


def test_bands_cover_and_those_that_ignore_the_noise_do_not():
    assert coverage(1.0) > 0.75
    assert coverage(0.02) < 0.6


def test_privacy_noise_widens_the_bands():
    widths = []
    for noise in (0.0, 1.0, 50.0):
        process, state = started(dpbnn.NoiseAware(**SMALL, rounds=2), noise_std=noise)
        zero = {name: torch.zeros(shape) for name, shape in process.shapes.items()}
        state = dataclasses.replace(state, steps=process.first)
        for _ in range(3):
            state = process.update(state, zero)
        widths.append(state.covariance.diagonal().sum())
    assert widths[0] < widths[1] < widths[2]


def test_rounds_end_where_steps_do_and_every_step_counts():
    process, state = started(dpbnn.NoiseAware(**SMALL, rounds=3), steps=9)
    zero = {name: torch.zeros(shape) for name, shape in process.shapes.items()}
    assert process.first == 1
    state = dataclasses.replace(state, steps=1)
    counts = []
    for _ in range(8):
        state = process.update(state, zero)
        counts.append(state.weight)
    assert counts == [0, 0, 1, 1, 1, 5, 5, 14]
    assert state.squares == pytest.approx(1 / 3 + 16 / 3 + 81 / 2)


def test_without_steps_or_privacy_it_samples():
    process, state = started(dpbnn.NoiseAware(**SMALL), private=False)
    drawn = process.posterior(state).predict(torch.zeros(2, 2)).samples(20)
    assert len(drawn) == 20
    x = torch.rand(60, 2)
    plan = dpbnn.open_plan(n=60, batch_size=20, steps=6)
    data, method = (x, (x[:, 0] > 0.5).long()), dpbnn.NoiseAware(**SMALL)
    posterior = dpbnn.fit(dpbnn.mlp(2, (3,), 2), data, "categorical", None, method, plan)
    assert math.isfinite(float(posterior.predict(x).mean.sum()))


def test_a_state_is_restored():
    process, state = started(dpbnn.NoiseAware(**SMALL))
    noise = {name: torch.randn(shape) for name, shape in process.shapes.items()}
    state = dataclasses.replace(state, steps=process.first)
    saved = flat(process.update(state, noise))
    _, first = started(dpbnn.NoiseAware(**SMALL))
    again = flat(restored(first, saved))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_what_it_cannot_do_is_refused_with_the_way_on():
    def problem(model, likelihood=None, prior=None):
        prior = dpbnn.Gaussian(1.0) if prior is None else prior
        return Problem(model, likelihood or Categorical(), prior, 10, 10, 2, True)

    method = dpbnn.NoiseAware()
    with pytest.raises(ValueError, match="for classes; use VI"):
        method.start(problem(dpbnn.mlp(2, (3,), 1), Gaussian(1.0)))
    with pytest.raises(ValueError, match="needs a Gaussian one"):
        method.start(problem(dpbnn.mlp(2, (3,), 2), prior=dpbnn.Laplace(1.0)))
    with pytest.raises(UnsupportedModel, match="at most 2000"):
        method.start(problem(dpbnn.mlp(20, (200,), 2)))
    convolution = torch.nn.Sequential(
        torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    with pytest.raises(UnsupportedModel, match="give public ones"):
        method.start(problem(convolution)).begin()
    given = dpbnn.NoiseAware(inputs=lambda count: torch.rand(count, 1, 8))
    assert given.start(problem(convolution)).begin().inputs.shape == (512, 1, 8)
    scheduled = dpbnn.plan(noise_multiplier=[1.0, 2.0], delta=1e-5, n=10, batch_size=10, steps=2)
    with pytest.raises(ValueError, match="changes from step to step"):
        method.settled(scheduled)
    with pytest.raises(ValueError, match="keep=100: must be below"):
        dpbnn.NoiseAware(keep=100)


def test_inputs_get_the_moments_asked_for_and_uniform_ones_stay():
    uniform = torch.quasirandom.SobolEngine(3, scramble=True, seed=1).draw(4096).double() * 2 - 1
    same = with_moments(uniform, torch.zeros(3).double(), torch.eye(3).double() / 3)
    assert (same - uniform).abs().max() < 0.01
    mean = torch.tensor([-0.4, 0.0, 0.6]).double()
    covariance = torch.tensor([[0.1, 0.06, 0.0], [0.06, 0.05, 0.0], [0.0, 0.0, 0.6]]).double()
    moved = with_moments(uniform, mean, covariance)
    assert moved.abs().max() <= 1
    assert (moved.mean(0) - mean).abs().max() < 0.02
    assert (torch.cov(moved.T) - covariance).abs().max() < 0.02
    wild = with_moments(uniform, torch.tensor([2.0, 0, 0]).double(), -torch.ones(3, 3).double())
    assert wild.isfinite().all()


def moved_inputs(noise_std, x, clip=3.0):
    """Return the public inputs after the steps that release moments."""
    settings = dpbnn.NoiseAware(points=1024, rounds=2, clip=clip)
    process, state = started(settings, n=len(x), steps=20, noise_std=noise_std)
    gate = dpbnn.Gate(clip, noise_std / clip or 1e-9, dpbnn.FullBatch(len(x)))
    for _ in range(process.first):
        contributions = process.contribute(state, x, torch.zeros(len(x)).long())
        assert float(contributions.norms().max()) <= clip * 1.001
        state = process.update(state, gate(contributions))
    return state.inputs


def test_the_first_steps_release_moments_and_shrink_them_as_far_as_the_noise_demands():
    torch.manual_seed(4)
    x = (torch.randn(4000, 2) * 0.2 + 0.3).clamp(-1, 1)
    exact = moved_inputs(1e-6, x)
    assert (exact.mean(0) - x.mean(0)).abs().max() < 0.02
    assert (exact.std(0) - x.std(0)).abs().max() < 0.03
    drowned = moved_inputs(1e7, x)
    assert drowned.mean(0).abs().max() < 0.05
    assert (drowned.std(0) - 3**-0.5).abs().max() < 0.05
    corner = torch.ones(50, 2)
    moved_inputs(1.0, corner)


def test_moments_of_an_empty_batch_are_released_like_any_other():
    process, state = started(dpbnn.NoiseAware(**SMALL), steps=20)
    x, y = torch.rand(5, 2), torch.zeros(5).long()
    kinds = []
    for rows in (5, 1, 0):
        found = process.contribute(state, x[:rows], y[:rows])
        sums = found.weighted_sum(torch.ones(rows))
        kinds.append([(name, v.dtype, v.shape) for name, v in sums.items()] + [found.shapes])
    assert kinds[0] == kinds[1] == kinds[2]
