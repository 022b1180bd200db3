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
from dpbnn.methods.surrogate import Surrogate, annealed_chains

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
    process, state = started(dpbnn.NoiseAware(clip=clip, **SMALL, rounds=2), std=0.7)
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
    plan = dpbnn.plan(epsilon=0.3, delta=1e-5, n=n, steps=4, sampling="full-batch")
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
        for _ in range(4):
            state = process.update(state, zero)
        widths.append(state.covariance.diagonal().sum())
    assert widths[0] < widths[1] < widths[2]


def test_rounds_end_where_steps_do_and_every_step_counts():
    process, state = started(dpbnn.NoiseAware(**SMALL, rounds=3), steps=8)
    zero = {name: torch.zeros(shape) for name, shape in process.shapes.items()}
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
    assert given.start(problem(convolution)).begin().inputs.shape == (500, 1, 8)
    scheduled = dpbnn.plan(noise_multiplier=[1.0, 2.0], delta=1e-5, n=10, batch_size=10, steps=2)
    with pytest.raises(ValueError, match="changes from step to step"):
        method.settled(scheduled)
    with pytest.raises(ValueError, match="keep=100: must be below"):
        dpbnn.NoiseAware(keep=100)
