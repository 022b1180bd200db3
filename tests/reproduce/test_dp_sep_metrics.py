"""Errors of a mixture's posterior: matching, the paper's squared norm, closed-form truth."""

import math

import pytest
import torch

from dpbnn.reproduce.dp_sep import (
    confidence_ring,
    label_posterior,
    match_components,
    mixture_error,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_components_in_another_order_are_matched():
    truth = 5 * torch.randn(6, 3, generator=generator())
    order = torch.randperm(6, generator=generator(1))
    means = truth[order] + 0.01
    found = match_components(means, truth)
    assert torch.equal(order[found], torch.arange(6))


def test_the_closest_pair_is_matched_first():
    truth = torch.tensor([[0.0], [1.0]])
    means = torch.tensor([[0.9], [5.0]])
    assert match_components(means, truth) == [1, 0]


def test_errors_are_sums_over_entries_and_means_over_components():
    truth = torch.tensor([[0.0, 0.0], [10.0, 0.0]])
    means = torch.tensor([[10.0, 4.0], [3.0, 0.0]])
    spread, true_spread = torch.eye(2).repeat(2, 1, 1), torch.zeros(2, 2, 2)
    found = mixture_error(means, truth, spread, true_spread)
    assert found.mean == pytest.approx((9 + 16) / 2)
    assert found.covariance == pytest.approx(2.0)
    assert found.average == pytest.approx((12.5 + 2) / 2)
    assert found.root_mean == pytest.approx((3 + 4) / 2)
    assert found.root_covariance == pytest.approx(math.sqrt(2))
    assert found.matching == (1, 0)
    assert math.isnan(mixture_error(means, truth).covariance)


def test_the_label_conditioned_posterior_is_bayes_rule():
    """Against the joint Gaussian of mean and points, one coordinate at a time."""
    x = torch.randn(7, 2, generator=generator(2)).double()
    labels = torch.tensor([0, 0, 1, 0, 1, 0, 0])
    centres = torch.tensor([[1.0, -1.0], [0.5, 2.0]]).double()
    means, covariances = label_posterior(x, labels, centres, 1.5, 0.4)
    for j in range(2):
        own = x[labels == j]
        count = len(own)
        cross = torch.full((count,), 1.5**2).double()
        inner = 1.5**2 * torch.ones(count, count) + 0.4**2 * torch.eye(count).double()
        gain = torch.linalg.solve(inner, cross)
        torch.testing.assert_close(means[j], centres[j] + gain @ (own - centres[j]))
        variance = 1.5**2 - gain @ cross
        torch.testing.assert_close(covariances[j], variance * torch.eye(2).double())


def test_a_component_without_points_keeps_its_prior():
    x, labels = torch.zeros(3, 2).double(), torch.zeros(3)
    centres = torch.ones(2, 2).double()
    means, covariances = label_posterior(x, labels, centres, 2.0, 0.5)
    assert torch.equal(means[1], centres[1])
    assert torch.equal(covariances[1], 4 * torch.eye(2).double())


def test_a_ring_holds_its_share_of_the_draws():
    """200000 draws, 5 standard errors: false alarms below 1e-6; the 97 % ring is told apart."""
    mean, covariance = torch.tensor([1.0, -2.0]), torch.tensor([[2.0, 0.7], [0.7, 0.5]])
    noise = torch.randn(200_000, 2, generator=generator(3))
    draws = mean + noise @ torch.linalg.cholesky(covariance).T
    away = draws - mean
    inside = (away * torch.linalg.solve(covariance, away.T).T).sum(-1)
    for level, same in ((0.98, True), (0.97, False)):
        ring = confidence_ring(mean, covariance, level)
        edge = ring - mean
        radius = (edge * torch.linalg.solve(covariance, edge.T).T).sum(-1)
        torch.testing.assert_close(radius, radius.mean().expand(100), rtol=1e-4, atol=0)
        share = (inside <= radius.mean()).float().mean().item()
        assert (abs(share - 0.98) < 5 * math.sqrt(0.98 * 0.02 / 200_000)) == same


def test_bad_input_says_so():
    with pytest.raises(ValueError, match=r"\[components, dimensions\]"):
        match_components(torch.zeros(3, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="finite"):
        match_components(torch.full((2, 2), math.nan), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="ring"):
        confidence_ring(torch.zeros(3), torch.eye(3))
