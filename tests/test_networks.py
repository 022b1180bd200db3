import copy

import pytest
import torch
from scipy import stats
from torch import nn

import dpbnn
from dpbnn.networks import (
    GaussianConv2d,
    GaussianLayer,
    GaussianLinear,
    Steps,
    cnn,
    mlp,
    to_gaussian,
)
from dpbnn.privacy.stream import fill_normal


def test_papers_networks_have_their_sizes():
    sizes = [p.shape for p in mlp().parameters() if p.dim() == 2]
    assert sizes == [(1200, 784), (1200, 1200), (10, 1200)]
    assert mlp()(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert cnn()(torch.randn(2, 1, 28, 28)).shape == (2, 10)
    assert sum(p.numel() for p in cnn().parameters()) == 26_010
    assert any(isinstance(m, nn.Tanh) for m in cnn(nn.Tanh))
    assert sum(isinstance(m, nn.Dropout) for m in mlp(3, (4, 4), 2, dropout=0.5)) == 2


def test_a_linear_path_is_beside_the_hidden_layers():
    """With the hidden units switched off, the network is linear in its inputs."""
    model = mlp(3, (4,), 2, linear_path=True)
    x = torch.randn(5, 3)
    hidden = torch.relu(model[1][0](x))
    expected = torch.cat([hidden, x], 1) @ model[2].weight.T + model[2].bias
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert str(mlp(3, (), 2, linear_path=True)) == str(mlp(3, (), 2))


def test_a_linear_path_has_steps_of_the_inputs_alone():
    torch.manual_seed(0)
    model = mlp(3, (4,), 2, linear_path=True, steps=0.5)
    x = torch.randn(5, 3)
    found = model[:-1](x)
    assert torch.equal(found[:, :7], model[2][1:](x))
    wanted = torch.cat([0.5 * torch.tanh(2 * (x - k)) for k in (-1, 0, 1)], 1)
    torch.testing.assert_close(found[:, 7:], wanted, rtol=1e-4, atol=2e-6)
    assert model(x).shape == (5, 2)


def test_steps_are_right_far_out_and_at_double_precision():
    x = torch.tensor([-40.0, -4.0, -1.0, 0.0, 0.3, 1.0, 4.0, 40.0], dtype=torch.float64)[:, None]
    found = Steps(1)(x)[:, 1:]
    wanted = torch.cat([torch.tanh(2 * (x - k)) for k in (-1, 0, 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    assert Steps(1)(x.float()).abs()[:, 1:].max() <= 1 + 1e-6


def test_expectation_propagation_refuses_a_linear_path():
    model = mlp(3, (4,), 1, linear_path=True)
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=10, batch_size=5, steps=2)
    data = torch.randn(10, 3), torch.randn(10)
    with pytest.raises(ValueError, match="is Beside where expectation propagation needs Linear"):
        dpbnn.fit(model, data, "gaussian", method=dpbnn.SEP(), plan=plan)


@pytest.mark.parametrize(
    "model",
    [
        mlp(6, (5,), 3),
        mlp(6, (5,), 3, linear_path=True),
        mlp(6, (5,), 3, linear_path=True, steps=0.5),
        nn.Linear(6, 3),
        nn.Sequential(nn.Flatten(), nn.Linear(6, 3)),
    ],
)
def test_to_gaussian_keeps_the_means_and_the_original(model):
    before = copy.deepcopy(model.state_dict())
    converted = to_gaussian(model, rho=-30.0)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert sum(isinstance(m, GaussianLayer) for m in converted.modules()) == sum(
        isinstance(m, nn.Linear) for m in model.modules()
    )
    x = torch.randn(4, 6)
    torch.testing.assert_close(converted(x), model(x))
    names = {n.removesuffix("_mu") for n, _ in converted.named_parameters() if n.endswith("_mu")}
    assert names == {n for n, _ in model.named_parameters()}


def test_to_gaussian_converts_convolutions_and_shared_modules():
    shared = nn.Conv2d(2, 2, 3, stride=1, padding="same", dilation=2, groups=2)
    model = nn.Sequential(shared, nn.Tanh(), shared).eval()
    converted = to_gaussian(model, rho=-30.0)
    assert converted[0] is converted[2]
    assert isinstance(converted[0], GaussianConv2d)
    assert not converted[0].training
    x = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(converted(x), model(x))
    with pytest.raises(ValueError, match="padding_mode"):
        to_gaussian(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))


def test_gaussian_layers_draw_with_their_standard_deviation():
    """Sample mean and deviation over 4000 draws; false alarm below 1e-6 at 5 standard errors."""
    layer = GaussianLinear(3, 2, rho=0.5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        draws = torch.stack([layer.at(layer.draw())["weight"] for _ in range(4000)])
    std = nn.functional.softplus(torch.tensor(0.5))
    assert ((draws.mean(0) - layer.weight_mu).abs() < 5 * std / 4000**0.5).all()
    assert ((draws.std(0) / std - 1).abs() < 5 / 8000**0.5).all()


def test_gaussian_layer_uses_its_mean_on_request_and_its_generator():
    layer = GaussianConv2d(1, 2, 3, padding=1, rho=0.0, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 1, 5, 5)
    state = torch.get_rng_state()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer(x, sample=False), layer(x, sample=False))
    assert torch.equal(state, torch.get_rng_state())


def test_rho_scale_is_the_derivative_of_the_drawn_weight():
    layer = GaussianLinear(3, 2, rho=-0.3)
    draw = layer.draw()
    weight = layer.at(draw)["weight"]
    (gradient,) = torch.autograd.grad(weight.sum(), layer.weight_rho)
    torch.testing.assert_close(gradient, layer.at_with_scale(draw)[1]["weight"])


class TestFillNormal:
    """Model draws on the CPU, by several threads."""

    def test_is_standard_normal_and_a_wrong_scale_would_be_seen(self):
        """False alarm once in 10 000 runs."""
        drawn = fill_normal(torch.empty(300, 1001)).double().flatten().numpy()
        assert stats.kstest(drawn, "norm").pvalue > 1e-4
        assert stats.kstest(1.04 * drawn, "norm").pvalue < 1e-4

    def test_repeats_with_the_seed_and_only_then(self):
        one, two, three = (
            fill_normal(torch.empty(5000), torch.Generator().manual_seed(seed))
            for seed in (1, 1, 2)
        )
        assert torch.equal(one, two)
        assert abs(float(torch.corrcoef(torch.stack([one, three]))[0, 1])) < 4 / 5000**0.5
        torch.manual_seed(3)
        first, second = fill_normal(torch.empty(5000)), fill_normal(torch.empty(5000))
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / 5000**0.5

    @pytest.mark.parametrize("tensor", [torch.empty(90, 80).T, torch.empty(3), torch.empty(0)])
    def test_any_layout_and_size(self, tensor):
        drawn = fill_normal(tensor.fill_(torch.inf))
        assert drawn is tensor
        assert drawn.isfinite().all()


@pytest.mark.parametrize("how", ["hook", "pre-hook", "forward", "spectral norm"])
def test_to_gaussian_drops_no_hook_silently(how):
    layer = nn.Linear(3, 2)
    if how == "hook":
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif how == "pre-hook":
        layer.register_forward_pre_hook(lambda module, inputs: None)
    elif how == "forward":
        layer.forward = lambda x: x
    else:
        layer = nn.utils.spectral_norm(layer)
    with pytest.raises(ValueError, match="Linear: has hooks or a forward of its own"):
        to_gaussian(nn.Sequential(layer, nn.ReLU()))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert type(to_gaussian(nn.Sequential(layer))[0]) is nn.Linear
