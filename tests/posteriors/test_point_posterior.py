"""The posterior that is one set of weights."""

import torch
from posterior_contract import PosteriorContract, X, network

from dpbnn.posteriors import PointPosterior


class TestPoint(PosteriorContract):
    random = False

    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        return PointPosterior(model or network(), likelihood, **record)

    def test_predictions_are_the_networks(self, posterior):
        pred = posterior.predict(X)
        assert torch.allclose(pred.mean, network()(X).softmax(-1), atol=1e-6)
        assert pred.epistemic.abs().max() < 1e-6
