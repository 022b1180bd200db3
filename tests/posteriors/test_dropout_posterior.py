"""Dropout masks on one set of weights."""

import itertools

import pytest
import torch
from posterior_contract import PosteriorContract, X, generator, network
from torch import nn

from dpbnn.likelihoods import Gaussian
from dpbnn.posteriors import DropoutPosterior


class TestDropout(PosteriorContract):
    def make(self, tmp_path, model=None, likelihood="categorical", **record):
        return DropoutPosterior(model or network(dropout=0.5), likelihood, **record)

    def test_another_network_is_refused(self, saved):
        from dpbnn import posteriors
        from dpbnn.networks import mlp

        with pytest.raises(ValueError, match=r"1\.weight: saved \(6, 4\), model \(7, 4\)"):
            posteriors.load(saved, model=mlp(4, (7, 5), 3, dropout=0.5))


def tiny(rate=0.3):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(rate), nn.Linear(4, 1))


@pytest.mark.parametrize("rate", [0.3, 0.4])
def test_moments_are_those_of_all_masks(rate):
    """6 standard errors: false alarms below 1e-8; a rate of 0.4 for 0.3 must be seen."""
    model, x = tiny(), torch.randn(3, 2, generator=generator())
    outputs, weights = [], []
    for mask in itertools.product((0, 1), repeat=4):
        kept = torch.tensor(mask, dtype=torch.float32)
        outputs.append(model[3](model[1](model[0](x)) * kept / 0.7)[:, 0])
        weights.append(0.7 ** sum(mask) * 0.3 ** (4 - sum(mask)))
    outputs, weights = torch.stack(outputs).detach(), torch.tensor(weights)[:, None]
    mean = (weights * outputs).sum(0)
    variance = (weights * (outputs - mean).square()).sum(0)
    fourth = (weights * (outputs - mean).pow(4)).sum(0)
    count = 20_000
    model[2].p = rate
    pred = DropoutPosterior(model, Gaussian(1.0), precision=4.0).predict(x, count, seed=0)
    assert torch.allclose(pred.mean, mean, atol=6 * (variance.max() / count).sqrt().item())
    error = (pred.epistemic - variance).abs()
    assert bool((error < 6 * ((fourth - variance.square()) / count).sqrt()).all()) == (rate == 0.3)
    assert torch.allclose(pred.variance, pred.epistemic + 1 / 4)


def test_only_dropout_is_random():
    """Normalisation layers stay in evaluation mode; masks of rate 0 do nothing."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 6), nn.Dropout(0.5))
    posterior = DropoutPosterior(model, "categorical")
    posterior.predict(torch.randn(8, 4))
    assert posterior.model[0].num_batches_tracked == 0
    drawn = posterior.outputs(X, 50, seed=0)
    plain = nn.Sequential(*model[:3]).eval()(X)
    assert ((drawn == 0) | torch.isclose(drawn, 2 * plain, atol=1e-5)).all()


def test_channels_are_dropped_whole():
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Flatten())
    model.append(nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[2].weight.copy_(torch.eye(8))
    drawn = DropoutPosterior(model, "categorical").outputs(torch.ones(3, 2, 2, 2), 40, seed=0)
    pairs = drawn.view(40, 3, 2, 4)
    assert (pairs == pairs[..., :1]).all()
    assert set(pairs.unique().tolist()) == {0.0, 2.0}


def test_transformer_layers_keep_their_dropout_on():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    with pytest.raises(ValueError, match=r"self_attn: MultiheadAttention has dropout 0\.5"):
        DropoutPosterior(layer, "categorical")
    layer.self_attn.dropout = 0.0
    posterior = DropoutPosterior(layer, "categorical")
    drawn = posterior.outputs(torch.randn(3, 5, 4), 10, seed=0)
    assert drawn.std(0).min() > 0


def test_what_cannot_be_masked_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.linear(self.drop(x)))

    with pytest.raises(ValueError, match="called twice"):
        DropoutPosterior(Twice(), "categorical").predict(X)
    with pytest.raises(ValueError, match="PointPosterior"):
        DropoutPosterior(network(), "categorical")
    with pytest.raises(ValueError, match="precision"):
        DropoutPosterior(tiny(), "categorical", precision=1.0)
    with pytest.raises(ValueError, match="AlphaDropout"):
        DropoutPosterior(nn.Sequential(nn.AlphaDropout(0.5)), "categorical")
    with pytest.raises(ValueError, match="first axis"):
        DropoutPosterior(
            nn.Sequential(nn.Flatten(0), nn.Unflatten(0, (-1, 2)), nn.Dropout(0.5)), "gaussian"
        ).predict(X)


def test_precision_survives_saving(tmp_path):
    from dpbnn.posteriors import load

    DropoutPosterior(tiny(), "gaussian", precision=4.0).save(tmp_path / "saved")
    assert load(tmp_path / "saved").precision == 4.0
