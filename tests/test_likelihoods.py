import pytest
import torch
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Normal

from dpbnn.likelihoods import Categorical, Gaussian, likelihood


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
