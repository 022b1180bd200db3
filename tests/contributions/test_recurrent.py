"""Recurrent layers: exact per-example gradients, trained, saved and predicted with."""

import copy

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.contributions import UnsupportedModel, attach

N, T, FEATURES, HIDDEN, CLASSES = 6, 5, 3, 4, 3


class Reads(nn.Module):
    """A recurrent layer whose outputs and last states are all used."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        width = layer.hidden_size * (1 + layer.bidirectional)
        self.out = nn.Linear(width + layer.hidden_size, CLASSES)

    def forward(self, x):
        read, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        read = read if self.layer.batch_first else read.transpose(0, 1)
        state = (last[0] + last[1]) if isinstance(last, tuple) else last
        return self.out(torch.cat([read[:, -1] + read.mean(1), state.sum(0)], -1))


class Loops(nn.Module):
    """A cell in a user's own loop."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(cell.hidden_size, CLASSES)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0] if isinstance(state, tuple) else state)


def sequence(kind, **options):
    torch.manual_seed(0)
    return Reads(kind(FEATURES, HIDDEN, **{"batch_first": True, **options}))


def loop(kind):
    torch.manual_seed(0)
    return Loops(kind(FEATURES, HIDDEN))


MODELS = {
    **{kind.__name__: (sequence, kind, {}) for kind in (nn.RNN, nn.LSTM, nn.GRU)},
    "relu": (sequence, nn.RNN, {"nonlinearity": "relu"}),
    "deep": (sequence, nn.LSTM, {"num_layers": 2}),
    "both ways": (sequence, nn.LSTM, {"bidirectional": True}),
    "deep both ways": (sequence, nn.GRU, {"bidirectional": True, "num_layers": 2}),
    "no bias": (sequence, nn.GRU, {"bias": False}),
    "time first": (sequence, nn.LSTM, {"batch_first": False}),
    **{kind.__name__: (loop, kind, {}) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)},
}


def batch(n=N):
    source = torch.Generator().manual_seed(1)
    x = torch.randn(n, T, FEATURES, generator=source)
    return x, torch.randint(0, CLASSES, (n,), generator=source)


def truth(model, x, y):
    """Per-example gradients by one backward pass for each example."""
    rows = []
    for i in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_single_examples(name):
    make, kind, options = MODELS[name]
    model = make(kind, **options)
    x, y = batch()
    gradients = truth(make(kind, **options), x, y)
    found = attach(model, "categorical")(x, y)
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).double().norm(dim=1)
    assert (found.norms() >= norms * (1 - 1e-6)).all()
    torch.testing.assert_close(found.norms(), norms, rtol=2e-3, atol=0)
    w = torch.linspace(0.1, 1, N)
    for weight, value in found.weighted_sum(w).items():
        expected = torch.tensordot(w, gradients[weight], 1)
        torch.testing.assert_close(value.float(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["LSTM", "deep both ways", "LSTMCell"])
def test_trained_and_predicted_with(name):
    make, kind, options = MODELS[name]
    x, y = batch(40)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=40, batch_size=20, steps=5)
    for method in (dpbnn.SGD(learning_rate=0.1), dpbnn.SGLD(learning_rate=0.01, clip=1.0)):
        posterior = dpbnn.fit(
            make(kind, **options), (x, y), "categorical", method=method, plan=plan
        )
        assert posterior.privacy.private
        assert torch.isfinite(posterior.predict(x, 4, seed=0).mean).all()


def test_recurrent_layers_are_rebuilt():
    from dpbnn.posteriors.architecture import build, describe

    for layer in (
        nn.LSTM(3, 4, 2, batch_first=True), nn.GRU(3, 4), nn.RNN(3, 4, nonlinearity="relu"),
        nn.LSTMCell(3, 4), nn.GRUCell(3, 4, bias=False),
    ):  # fmt: skip
        assert str(build(describe(layer))) == str(layer)


class Translates(nn.Module):
    """The last state of one layer is the first of another."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.decoder = nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        return self.out(self.decoder(x.flip(1), self.encoder(x)[1])[0][:, -1])


def test_a_first_state_that_depends_on_the_record_has_its_gradient_once():
    torch.manual_seed(0)
    model = Translates()
    x, y = batch()
    gradients = truth(copy.deepcopy(model), x, y)
    found = attach(model, "categorical")(x, y)
    norms = torch.cat([g.flatten(1) for g in gradients.values()], 1).double().norm(dim=1)
    torch.testing.assert_close(found.norms(), norms, rtol=2e-3, atol=0)


def test_what_has_no_rule_is_refused_with_the_way_on():
    x, y = batch()
    with pytest.raises(UnsupportedModel, match="proj_size"):
        attach(sequence(nn.LSTM, proj_size=2), "categorical")(x, y)

    class Packs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(FEATURES, HIDDEN, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            lengths = torch.full((len(x),), T)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.out(self.layer(packed)[1][0][0])

    with pytest.raises(UnsupportedModel, match="pad the sequences"):
        attach(Packs(), "categorical")(x, y)


def test_replay_finds_no_record_above_the_clip():
    x, y = batch(12)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-4, n=12, sampling="full-batch", steps=3)
    found = dpbnn.replay(
        dpbnn.SGD(learning_rate=0.1, clip=0.5),
        (x, y),
        3,
        model=lambda: sequence(nn.LSTM),
        plan=plan,
    )
    assert found.passed, str(found)
