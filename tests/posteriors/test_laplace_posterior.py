"""Iterates with deviations: predictions stay, draws are those of the linearised network."""

import pickle

import pytest
import torch
from posterior_contract import PosteriorContract, X, generator, network
from test_iterate_posterior import chain
from torch import nn
from torch.func import functional_call, jvp

from dpbnn import posteriors
from dpbnn.posteriors import IteratePosterior, LaplacePosterior


def away(model, count=20, scale=0.1, names=None):
    draws = generator(9)
    values = dict(model.named_parameters())
    found = {}
    for name in names or values:
        half = scale * torch.randn(count // 2, *values[name].shape, generator=draws)
        found[name] = torch.cat([half, -half])
    return found


class TestLaplace(PosteriorContract):
    random = False

    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        model = model or network()
        chain(model, tmp_path / "chain")
        return LaplacePosterior(
            model, likelihood, tmp_path / "chain", deviations=away(model), **record
        )

    def test_deviations_survive_save_and_load(self, posterior, saved):
        before = posterior.predict(X).probabilities
        assert torch.equal(posteriors.load(saved).predict(X).probabilities, before)

    def test_predictions_are_those_of_the_iterates(self, posterior):
        plain = IteratePosterior(posterior.model, "categorical", posterior.iterates)
        assert torch.equal(posterior.predict(X).mean, plain.predict(X).mean)
        assert torch.equal(posterior.predict(X).plain.probabilities, plain.predict(X).probabilities)

    def test_draws_are_those_of_the_linearised_network(self, posterior):
        model = posterior.model.double()
        at = dict(model.named_parameters())
        found = posterior.predict(X).deviations.values
        for draw in (0, 7, 19):
            d = {n: away(network())[n][draw].double() for n in at}
            exact = jvp(lambda w: functional_call(model, w, (X.double(),)), (at,), (d,))[1]
            assert torch.allclose(found[draw], exact, atol=1e-5)

    def test_chunks_do_not_change_the_draws(self, posterior):
        whole = posterior.predict(X).probabilities
        for limits in ({"batch_size": 3}, {"memory_limit": 1}):
            few = posterior.predict(X, **limits).probabilities
            assert torch.allclose(few, whole, atol=1e-5)

    def test_fewer_samples_are_as_many_draws(self, posterior):
        assert len(posterior.predict(X, 6).probabilities) == 6
        assert len(posterior.predict(X, 500).probabilities) == 20

    def test_a_prediction_can_be_pickled(self, posterior):
        found = posterior.predict(X)
        again = pickle.loads(pickle.dumps(found))
        assert torch.equal(again.probabilities, found.probabilities)


def test_a_linear_network_is_exact(tmp_path):
    model = nn.Linear(4, 1)
    chain(model, tmp_path / "chain")
    d = away(model)
    posterior = LaplacePosterior(model, "gaussian", tmp_path / "chain", deviations=d)
    found = posterior.predict(X).deviations.values
    exact = X.double() @ d["weight"][:, 0].double().T + d["bias"][:, 0].double()
    assert torch.allclose(found, exact.T, atol=1e-6)


def test_parameters_that_are_left_out_do_not_deviate(tmp_path):
    model = nn.Linear(4, 1)
    chain(model, tmp_path / "chain")
    d = away(model, names=["bias"])
    posterior = LaplacePosterior(model, "gaussian", tmp_path / "chain", deviations=d)
    found = posterior.predict(X).deviations.values
    assert torch.allclose(found, d["bias"].double().expand_as(found), atol=1e-6)


def test_deviations_of_other_shapes_are_refused(tmp_path):
    model = network()
    chain(model, tmp_path / "chain")
    with pytest.raises(ValueError, match="deviations"):
        LaplacePosterior(
            model, "categorical", tmp_path / "chain", deviations={"1.weight": torch.zeros(5, 2)}
        )
