import math

import pytest
import torch
from scipy import integrate, stats

from dpbnn.priors import Flat, Gaussian, Laplace, ScaleMixture, prior

PRIORS = [Gaussian(0.7, 0.2), Laplace(0.3), Flat(), ScaleMixture(0.3, 1.5, 0.1)]


@pytest.mark.parametrize("p", PRIORS, ids=lambda p: type(p).__name__)
class TestEveryPrior:
    def test_the_gradient_is_that_of_the_density(self, p):
        w = torch.tensor([-2.0, -0.3, 0.05, 1.1], dtype=torch.float64, requires_grad=True)
        value = -p.log_prob(w)
        expected = torch.zeros(4).double()
        if value.requires_grad:
            (expected,) = torch.autograd.grad(value, w)
        torch.testing.assert_close(p.gradient(w.detach()), expected)

    def test_the_cross_entropy_and_its_gradient(self, p):
        mean = torch.tensor([0.4, -0.2], dtype=torch.float64, requires_grad=True)
        std = torch.tensor([0.5, 0.05], dtype=torch.float64, requires_grad=True)
        value = p.cross_entropy(mean, std)
        gradient = p.cross_entropy_gradient(mean, std)
        if value is None:
            assert gradient is None
            return
        total = sum(
            integrate.quad(
                lambda w, m=m, s=s: (
                    -float(p.log_prob(torch.tensor([w]).double())) * stats.norm.pdf(w, m, s)
                ),
                m - 12 * s,
                m + 12 * s,
                points=[0.0] if m - 12 * s < 0 < m + 12 * s else None,
            )[0]
            for m, s in zip(mean.tolist(), std.tolist(), strict=True)
        )
        assert float(value) == pytest.approx(total, rel=1e-6, abs=1e-9)
        if value.requires_grad:
            for ours, exact in zip(gradient, torch.autograd.grad(value, (mean, std)), strict=True):
                torch.testing.assert_close(ours, exact)
        else:
            assert all((g == 0).all() for g in gradient)

    def test_plain_values_give_it_back(self, p):
        assert prior(p.to_dict()) == p


def test_densities_are_those_of_scipy():
    w = torch.tensor([0.3, -1.0], dtype=torch.float64)
    assert float(Gaussian(0.5, 0.1).log_prob(w)) == pytest.approx(
        stats.norm.logpdf(w, 0.1, 0.5).sum()
    )
    assert float(Laplace(0.5).log_prob(w)) == pytest.approx(stats.laplace.logpdf(w, 0, 0.5).sum())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(0.0), "std=0"),
        (lambda: Laplace(-1.0), "scale=-1"),
        (lambda: ScaleMixture(1.0), "share=1"),
        (lambda: Gaussian(math.nan), "std=nan"),
    ],
)
def test_bad_settings_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()
