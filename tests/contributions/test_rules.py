"""Every rule against float64 gradients, on architectures that hypothesis draws."""

import warnings

import pytest
import torch
from contributions_contract import assert_matches, gaussian_truth, per_example
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpbnn.contributions import attach
from dpbnn.contributions.outer import Outer
from dpbnn.likelihoods import HeteroscedasticGaussian
from dpbnn.networks import LearnedNoise, SlopedNoise, to_gaussian

drawn = settings(max_examples=25, deadline=None, print_blob=True)
small = st.integers(1, 3)


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def activation(draw):
    return draw(st.sampled_from([nn.Tanh, nn.GELU, nn.Softplus, nn.SiLU]))()


@st.composite
def vectors(draw):
    width = draw(st.integers(1, 9))
    shape, layers = (width,), []
    for _ in range(draw(st.integers(1, 3))):
        out = draw(st.integers(4, 12))
        layers += [nn.Linear(width, out, bias=draw(st.booleans())), activation(draw)]
        kind = draw(st.sampled_from(["none", "layer", "rms", "group"]))
        if kind == "layer":
            layers.append(nn.LayerNorm(out, bias=draw(st.booleans())))
        elif kind == "rms":
            layers.append(nn.RMSNorm(out, eps=1e-5))
        elif kind == "group":
            layers.append(nn.GroupNorm(1, out))
        width = out
    if draw(st.booleans()):
        again = nn.Linear(width, width)
        layers += [again, activation(draw), again]
    return nn.Sequential(*layers, nn.Linear(width, 3)), shape, None


class Attention(nn.Module):
    def __init__(self, width, need_weights):
        super().__init__()
        self.inner, self.need_weights = (
            nn.MultiheadAttention(width, 2, batch_first=True),
            need_weights,
        )

    def forward(self, x):
        out, weights = self.inner(x, x, x.tanh(), need_weights=self.need_weights)
        return out if weights is None else out + weights.square().mean((1, 2))[:, None, None]


@st.composite
def sequences(draw, gaussian=False):
    length, width = draw(st.integers(1, 9)), 2 * draw(st.integers(2, 6))
    tokens = not gaussian and draw(st.booleans())
    layers = []
    if tokens:
        layers.append(nn.Embedding(5, width, padding_idx=draw(st.sampled_from([None, 0, 3]))))
    for _ in range(draw(st.integers(1, 3))):
        kinds = ["linear", "layer", "rms", "encoder", "attention", "conv"]
        kind = draw(st.sampled_from(kinds[:3] if gaussian else kinds))
        if kind == "attention":
            layers.append(Attention(width, draw(st.booleans())))
        elif kind == "linear":
            out = 2 * draw(st.integers(2, 8))
            layers += [nn.Linear(width, out, bias=draw(st.booleans())), activation(draw)]
            width = out
        elif kind == "layer":
            layers.append(nn.LayerNorm((length, width) if draw(st.booleans()) else width))
        elif kind == "rms":
            layers.append(nn.RMSNorm(width, eps=1e-5))
        elif kind == "encoder":
            layers.append(
                nn.TransformerEncoderLayer(
                    width,
                    2,
                    8,
                    dropout=0.0,
                    batch_first=True,
                    norm_first=draw(st.booleans()),
                    activation="gelu",
                )
            )
        else:
            swap = Apply(lambda x: x.transpose(1, 2))
            layers += [swap, nn.Conv1d(width, width, 3, padding=1, groups=2), swap]
    layers += [Apply(lambda x: x.mean(1)), nn.Linear(width, 3)]
    shape = (length, _input_width(layers))
    return nn.Sequential(*layers), (length,) if tokens else shape, 5 if tokens else None


def _input_width(layers):
    for layer in layers:
        for name in ("in_features", "embedding_dim", "in_channels"):
            if hasattr(layer, name):
                return getattr(layer, name)
        if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
            return layer.normalized_shape[-1]
        if isinstance(layer, nn.TransformerEncoderLayer):
            return layer.linear1.in_features
        if isinstance(layer, Attention):
            return layer.inner.embed_dim
    raise AssertionError


@st.composite
def images(draw, gaussian=False):
    axes = 2 if gaussian else draw(st.integers(1, 3))
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
    size = draw(st.integers(3, 5) if axes == 3 else st.integers(5, 7))
    groups = draw(st.sampled_from([1, 2]))
    channels = groups * draw(small)
    shape, layers = (channels, *[size] * axes), []
    for _ in range(draw(st.integers(1, 2))):
        out = 2 * draw(st.integers(1, 4))
        groups = draw(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
        modes = ["zeros", "circular", "replicate", "reflect"]
        mode = "zeros" if gaussian else draw(st.sampled_from(modes))
        string = draw(st.booleans())
        layers += [
            convolution(
                channels,
                out,
                draw(st.one_of(small, st.just(size))),
                stride=1 if string else draw(st.integers(1, 2)),
                padding=draw(st.sampled_from(["same", "valid"]))
                if string
                else draw(st.integers(0, 1 if axes == 3 else 2)),
                dilation=draw(st.integers(1, 2)),
                groups=groups,
                bias=draw(st.booleans()),
                padding_mode=mode,
            ),
            activation(draw),
        ]
        if not gaussian and out > 4 and draw(st.booleans()):  # two values would come out as +-1
            layers.append(nn.GroupNorm(draw(st.sampled_from([1, 2])), out))
        channels = out
    model = nn.Sequential(*layers, nn.Flatten())
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            width = model(torch.zeros(2, *shape)).shape[1]
    except RuntimeError:
        return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 3)), shape, None
    return nn.Sequential(*model, nn.Linear(width, 3)), shape, None


def batch(shape, tokens, size=4):
    g = torch.Generator().manual_seed(7)
    y = torch.randint(0, 3, (size,), generator=g)
    if tokens:
        return torch.randint(0, tokens, (size, *shape), generator=g), y
    return torch.randn(size, *shape, generator=g), y


@pytest.fixture(params=[None, "gram", "instantiated"], autouse=False)
def form(request, monkeypatch):
    monkeypatch.setattr(Outer, "form", request.param)
    return request.param


@pytest.mark.parametrize("kind", [vectors, sequences, images])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_random_architectures_match_float64(kind, form):
    @drawn
    @given(
        kind(),
        st.sampled_from(["categorical", "gaussian"]),
        st.integers(0, 99),
        st.sampled_from([None, None, 1, 3]),
        st.sets(st.integers(0, 9), max_size=3),
    )
    def check(case, likelihood, seed, microbatch_size, frozen):
        model, shape, tokens = case
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.Embedding):  # not zero at the padding: norms divide by it
                nn.init.normal_(module.weight)
        for index, parameter in enumerate(list(model.parameters())[:-1]):
            parameter.requires_grad_(index not in frozen)
        x, y = batch(shape, tokens)
        if likelihood == "gaussian":
            y = torch.randn(len(y), 3)
        c = attach(model, likelihood, microbatch_size=microbatch_size)(x, y)
        assert_matches(c, per_example(model, likelihood, x, y))

    check()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("space", ["weights", "parameters"])
def test_random_gaussian_architectures_match_float64(space, form):
    @settings(drawn, max_examples=12)
    @given(
        st.one_of(images(gaussian=True), vectors(), sequences(gaussian=True)),
        st.integers(1, 3),
        st.booleans(),
    )
    def check(case, draws, constant):
        plain, shape, tokens = case
        model = to_gaussian(plain, rho=-3.0)  # where float32 does not saturate the likelihood
        x, y = batch(shape, tokens)
        g = torch.Generator().manual_seed(5)
        attached = attach(model, "categorical", space=space, draws=draws)
        constants = {
            n: 0.3 * torch.randn(s, generator=g) for n, s in attached.shapes.items() if constant
        }
        c = attached(x, y, data_free=constants)
        truth = gaussian_truth(plain, model, "categorical", x, y, c.draws, space, constants)
        assert_matches(c, truth)

    check()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(6, 4), nn.Embedding(5, 4)
        self.mix, self.out = nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.position(torch.arange(x.shape[1]))
        return self.out(self.mix(torch.tanh(self.mix(h))).mean(1))


def test_tied_weights_reused_modules_and_shared_positions(form):
    model = Tied()
    x, y = torch.randint(0, 6, (4, 5)), torch.randint(0, 6, (4,))
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_with_either_batch_axis(batch_first):
    """Sequence length equals batch size, so a wrong axis would go unnoticed by shapes alone."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first),
        2,
        enable_nested_tensor=False,
    )
    swap = Apply(lambda x: x if batch_first else x.transpose(0, 1))
    model = nn.Sequential(swap, encoder, swap, Apply(lambda x: x.mean(1)), nn.Linear(8, 3))
    x, y = batch((4, 8), None)
    for mode in (True, False):
        model.train(mode)
        assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


class Masked(nn.Module):
    def __init__(self, need_weights):
        super().__init__()
        self.need_weights = need_weights
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, memory, padding):
        causal = torch.triu(torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool), 1)
        out, weights = self.attention(
            x,
            memory,
            memory,
            key_padding_mask=padding,
            attn_mask=causal,
            need_weights=self.need_weights,
        )
        return self.out(out.mean(1)) + (
            0 if weights is None else weights.square().mean((1, 2))[:, None]
        )


@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention_with_masks(need_weights):
    model = Masked(need_weights)
    x, y = batch((5, 8), None)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1, 3:] = True
    inputs = (x, torch.randn(4, 5, 8), padding)
    c = attach(model, "categorical")(inputs, y)
    assert_matches(c, per_example(model, "categorical", inputs, y))


def test_rows_folded_into_the_batch_axis():
    model = nn.Sequential(
        Apply(lambda x: x.flatten(0, 1)),
        nn.Linear(6, 5),
        nn.Tanh(),
        Apply(lambda x: x.view(-1, 3, 5).sum(1)),
        nn.Linear(5, 3),
    )
    x, y = batch((3, 6), None)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    x, y = batch((6,), None)
    c = attach(model, "categorical")(x, y)
    assert set(c.shapes) == {"0.bias", "2.weight", "3.weight"}
    assert_matches(c, per_example(model, "categorical", x, y))


def test_in_place_activations_after_a_layer():
    model = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True)
    )
    x, y = batch((6,), None)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def test_in_place_activations_after_an_output_that_is_a_view():
    model = nn.Sequential(
        nn.Conv1d(2, 4, 2), nn.InstanceNorm1d(4, affine=True), nn.ReLU(inplace=True), nn.Flatten()
    )
    x, y = batch((2, 3), None)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


@pytest.mark.parametrize("kind", [LearnedNoise, SlopedNoise])
@pytest.mark.parametrize("positions", [1, 4])
def test_a_learned_noise(positions, kind):
    """One log-variance, or slope of it, for all examples and all positions of an example."""
    swap = Apply(lambda x: x if positions > 1 else x.squeeze(1))
    model = nn.Sequential(swap, nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), kind(2, 0.3))
    if kind is SlopedNoise:
        nn.init.normal_(model[-1].slope)
    x, _ = batch((positions, 5), None)
    y = torch.randn(len(x), positions, 2) if positions > 1 else torch.randn(len(x), 2)
    likelihood = HeteroscedasticGaussian()
    attached = attach(model, likelihood)
    assert all(unit.rule is not None for unit in attached.units)
    assert_matches(attached(x, y), per_example(model, likelihood, x, y))


def test_layers_without_parameters_are_left_alone():
    """Those that normalise hold none here, so examples may lie on any axis there."""
    folded = Apply(lambda x: x.flatten(0, 1))
    back = Apply(lambda x: torch.unflatten(x, 0, (-1, 2)).flatten(1))
    norm = nn.InstanceNorm2d(3)
    model = nn.Sequential(folded, norm, nn.LayerNorm(4, elementwise_affine=False), back,
                          nn.Linear(96, 5))  # fmt: skip
    attached = attach(model, "categorical")
    assert [unit.path for unit in attached.units] == ["4"]
    x, y = torch.randn(3, 2, 3, 4, 4), torch.randint(0, 5, (3,))
    assert_matches(attached(x, y), per_example(model, "categorical", x, y))
