"""The posterior that is a set of draws."""

import pytest
import torch
from posterior_contract import PosteriorContract, X, generator, network

from dpbnn.posteriors import DrawnPosterior


def drawn(model, count=7):
    return {
        name: p.detach() + 0.1 * torch.randn(count, *p.shape, generator=generator())
        for name, p in model.named_parameters()
    }


class TestDrawn(PosteriorContract):
    random = False

    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        model = model or network()
        return DrawnPosterior(model, likelihood, drawn(model), **record)

    def test_the_first_draws_are_used(self, posterior):
        few, all_of_them = posterior.outputs(X, 3), posterior.outputs(X, 50)
        assert len(all_of_them) == 7
        assert torch.allclose(few, all_of_them[:3])

    def test_intervals_are_quantiles(self, posterior):
        name = next(iter(posterior.draws))
        low, high = posterior.interval(name, 0.5)
        inside = (posterior.draws[name] >= low) & (posterior.draws[name] <= high)
        assert inside.double().mean() == pytest.approx(3 / 7, abs=0.2)

    def test_draws_of_other_lengths_are_refused(self):
        model = network()
        draws = drawn(model)
        name = next(iter(draws))
        with pytest.raises(ValueError, match="as many of each"):
            DrawnPosterior(model, "categorical", {**draws, name: draws[name][:2]})
