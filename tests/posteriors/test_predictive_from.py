"""The predictive distribution that a likelihood makes of raw outputs."""

import pytest
import torch

from dpbnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from dpbnn.posteriors import predictive_from
from dpbnn.predictive import RealPredictive


def test_categorical_is_softmax():
    outputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(predictive_from(Categorical(), outputs).mean, outputs.softmax(-1).mean(0))


def test_gaussian_has_its_noise():
    pred = predictive_from(Gaussian(0.5), torch.zeros(3, 4, 1))
    assert pred.mean.shape == (4,)
    assert pred.aleatoric.tolist() == [0.25] * 4


def test_a_likelihood_may_bring_its_own():
    class Own:
        def predictive(self, outputs):
            return RealPredictive(outputs[..., 0], outputs[..., 1].exp())

    assert predictive_from(Own(), torch.zeros(3, 4, 2)).variance.tolist() == [1] * 4
    with pytest.raises(TypeError, match="predictive"):
        predictive_from(object(), torch.zeros(3, 4, 2))


def test_low_precision_outputs_are_widened():
    assert predictive_from(Categorical(), torch.zeros(1, 2, 3).bfloat16()).mean.dtype == (
        torch.float32
    )


def test_a_noise_not_learned_yet_is_refused():
    with pytest.raises(ValueError, match="noise_std"):
        predictive_from(Gaussian(None), torch.zeros(3, 4, 1))


def test_heteroscedastic_outputs_carry_their_noise():
    outputs = torch.tensor([1.0, 0.0]).expand(3, 4, 2)
    pred = predictive_from(HeteroscedasticGaussian(), outputs)
    assert pred.mean.tolist() == [1] * 4
    assert pred.aleatoric.tolist() == [1] * 4
