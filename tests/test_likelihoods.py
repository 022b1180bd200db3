import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal

from dpbnn.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    LearnedNoiseGaussian,
    likelihood,
)


def test_categorical_is_the_log_softmax_of_the_label():
    outputs, y = torch.randn(5, 3), torch.randint(0, 3, (5,))
    expected = TorchCategorical(logits=outputs).log_prob(y)
    torch.testing.assert_close(Categorical().log_prob(outputs, y), expected)


def test_categorical_sums_over_positions():
    outputs, y = torch.randn(5, 4, 3), torch.randint(0, 3, (5, 4))
    expected = TorchCategorical(logits=outputs).log_prob(y).sum(1)
    torch.testing.assert_close(Categorical().log_prob(outputs, y), expected)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_gaussian_is_the_normal_density(shape):
    outputs, y = torch.randn(5, *(shape[1:] or (1,))), torch.randn(shape)
    expected = Normal(outputs, 0.3).log_prob(y.view_as(outputs)).sum(1)
    torch.testing.assert_close(Gaussian(0.3).log_prob(outputs, y), expected)


def test_lookup_and_refusals():
    assert likelihood("categorical") == Categorical()
    assert likelihood("gaussian") == Gaussian(1.0)
    with pytest.raises(ValueError, match="'gaussian'"):
        likelihood("normal")
    with pytest.raises(ValueError, match="noise_std"):
        Gaussian(0.0)


def test_a_learned_noise_does_not_scale_the_gradient_of_the_mean():
    """The value is the log-probability; the mean's gradient is that of noise 1."""
    outputs = torch.tensor([[0.5, -3.0], [2.0, 1.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.5, -1.0], dtype=torch.float64)
    found = LearnedNoiseGaussian().log_prob(outputs, y)
    usual = HeteroscedasticGaussian().log_prob(outputs, y)
    torch.testing.assert_close(found, usual)
    (own,) = torch.autograd.grad(found.sum(), outputs, retain_graph=True)
    (other,) = torch.autograd.grad(usual.sum(), outputs)
    torch.testing.assert_close(own[:, 0], y - outputs[:, 0].detach())
    torch.testing.assert_close(own[:, 1], 0.1 * other[:, 1])
