"""Attaching: refusals that name module and cure, the probe, and a model left as it was."""

import copy
import gc
import weakref

import pytest
import torch
from contributions_contract import assert_matches, per_example
from torch import nn

import dpbnn.contributions
from dpbnn.contributions import UnsupportedModel, attach, fallback
from dpbnn.contributions.probe import _Probe
from dpbnn.networks import GaussianLinear, mlp, to_gaussian


def data(*shape, size=4):
    torch.manual_seed(0)
    return torch.randn(size, *shape), torch.randint(0, 3, (size,))


class Coupled(nn.Module):
    """Adds a little of the batch mean to every example."""

    def __init__(self, amount=1e-2):
        super().__init__()
        self.amount = amount

    def forward(self, x):
        return x + self.amount * x.mean(0, keepdim=True)


class Running(nn.Module):
    """Gives every example the mean of those up to it: the first one depends on no other."""

    def forward(self, x):
        return x.cumsum(0) / torch.arange(1, len(x) + 1).unsqueeze(1)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean += x.detach().mean()
        return x


class Outside(nn.Module):
    """Uses a layer's weight outside the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) + x @ self.layer.weight.T


class Scaled(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.scale, self.inner, self.dropout = (
            nn.Parameter(torch.ones(6)),
            nn.Linear(6, 3),
            nn.Dropout(p),
        )

    def forward(self, x):
        return self.inner(self.dropout(x * self.scale))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)),
            ["'1' (BatchNorm1d)", "GroupNorm"],
        ),
        (
            nn.Sequential(nn.Linear(6, 6), nn.InstanceNorm1d(2, track_running_stats=True)),
            ["'1' (InstanceNorm1d)", "GroupNorm"],
        ),
        (nn.Linear(6, 3).requires_grad_(False), ["no trainable parameter", "requires_grad"]),
    ],
)
def test_refused_when_attached(model, names):
    with pytest.raises(UnsupportedModel) as error:
        attach(model, "categorical")
    assert all(name in str(error.value) for name in names)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            nn.Sequential(nn.Linear(6, 5), Coupled(), nn.Linear(5, 3)),
            ["depends on the other examples", "GroupNorm"],
        ),
        (
            nn.Sequential(Coupled(), nn.Linear(6, 3)),
            ["depends on the other examples", "'1' (Linear)"],
        ),
        (
            nn.Sequential(Running(), nn.Linear(6, 3)),
            ["depends on the other examples", "'1' (Linear)"],
        ),
        (nn.Sequential(Counting(), nn.Linear(6, 3)), ["'0' (Counting)", "buffer"]),
        (Outside(), ["'layer' (Linear)", "outside its module"]),
        (Scaled(0.5), ["(Scaled)", "random numbers", "module of its own"]),
        (
            nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten(), nn.Linear(18, 3)),
            ["'0' (Embedding)", "max_norm"],
        ),
        (
            nn.Sequential(
                nn.Embedding(9, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 3)
            ),
            ["'0' (Embedding)", "scale_grad_by_freq"],
        ),
    ],
)
def test_refused_before_the_first_contribution(model, names):
    x, y = data(6)
    x = torch.randint(0, 9, (4, 6)) if isinstance(next(model.children()), nn.Embedding) else x
    with pytest.raises(UnsupportedModel) as error:
        attach(model, "categorical")(x, y)
    assert all(name in str(error.value) for name in names), error.value


def weighted_mean(outputs, y):
    weights = torch.tensor([1.0, 2.0, 5.0])[y]
    return -nn.functional.cross_entropy(outputs, y, reduction="none") * weights / weights.sum()


def batch_mean(outputs, y):
    return -nn.functional.cross_entropy(outputs, y, reduction="none") / len(y)


def scalar(outputs, y):
    return -nn.functional.cross_entropy(outputs, y)


def reversed_rows(outputs, y):
    return -nn.functional.cross_entropy(outputs, y, reduction="none").flip(0)


def shared_with_the_next(outputs, y):
    """The sum over the batch is right, and no row is that of its example alone."""
    log_prob = -nn.functional.cross_entropy(outputs, y, reduction="none")
    return 0.5 * (log_prob + log_prob.roll(1))


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        (weighted_mean, "mixes examples"),
        (batch_mean, "mixes examples"),
        (scalar, "one log-probability per example"),
        (reversed_rows, "not its gradient"),
        (shared_with_the_next, "not its gradient"),
    ],
)
def test_likelihoods_that_mix_examples_are_refused(likelihood, message):
    model = nn.Linear(6, 3)
    with pytest.raises(UnsupportedModel, match=message) as error:
        attach(model, likelihood)(*data(6))
    assert likelihood.__name__ in str(error.value) or "'weight'" in str(error.value)


def test_losses_and_unknown_names_are_refused():
    model = nn.Linear(6, 3)
    with pytest.raises(UnsupportedModel, match="is a loss"):
        attach(model, nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match="categorical"):
        attach(model, "cauchy")
    with pytest.raises(TypeError, match="log_prob"):
        attach(model, 3)


def test_without_the_probe_coupling_would_go_unnoticed(monkeypatch):
    """The other examples move the first one's contribution, and nothing is raised."""
    monkeypatch.setattr(_Probe, "refuse_coupling", lambda *a: None)
    monkeypatch.setattr(_Probe, "refuse_missing", lambda *a: None)
    torch.manual_seed(0)
    coupled = nn.Sequential(nn.Linear(6, 5), Coupled(), nn.Linear(5, 3))
    x, y = data(6)
    other = torch.cat([x[:1], 50 * x[1:]])

    def moved(model):
        one, two = (attach(model, "categorical")(z, y).weighted_sum(torch.eye(4)[0])
                    for z in (x, other))  # fmt: skip
        return max(float((one[name] - two[name]).abs().max()) for name in one)

    assert moved(coupled) > 1e-2
    assert moved(nn.Sequential(coupled[0], coupled[2])) < 1e-6


def test_batchnorm_switched_to_training_later_is_refused():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    x, y = data(6)
    attached = attach(model, "categorical")
    assert_matches(attached(x, y), per_example(model, "categorical", x, y))
    model.train()
    with pytest.raises(UnsupportedModel, match="GroupNorm"):
        attached(x, y)


def test_unfreezing_after_attaching_is_refused():
    model = mlp(6, (5,), 3)
    model[1].weight.requires_grad_(False)
    attached = attach(model, "categorical")
    attached(*data(6))
    model[1].weight.requires_grad_(True)
    with pytest.raises(UnsupportedModel, match="attach again"):
        attached(*data(6))


def test_inputs_changed_in_place_are_refused():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            x = x * 1.0
            z = self.layer(x)
            x += 1
            return z + x

    with pytest.raises(UnsupportedModel, match="in place"):
        attach(Changing(), "categorical")(*data(6))


def test_fallback_for_modules_with_raw_parameters():
    model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.PReLU())
    x, y = data(6)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def changed_before_the_sum():
    model = nn.Sequential(nn.Linear(6, 6), Scaled())
    c = attach(model, "categorical")(*data(6))
    c.norms()
    with torch.no_grad():
        model[1].scale *= 2
    return c, model


def test_parameters_that_change_before_the_sum_are_noticed(monkeypatch):
    """Replayed at other parameters, the sum would be of other gradients than the norms."""
    monkeypatch.setattr(fallback, "KEPT", 0)
    c, _ = changed_before_the_sum()
    with pytest.raises(RuntimeError, match="contributions were summed"):
        c.weighted_sum(torch.ones(4))


def test_kept_gradients_outlive_a_change_of_the_parameters():
    c, model = changed_before_the_sum()
    late = attach(model, "categorical")(*data(6)).weighted_sum(torch.ones(4))
    early = c.weighted_sum(torch.ones(4))
    assert not torch.allclose(early["1.inner.weight"], late["1.inner.weight"])


def test_fallback_for_transposed_convolutions_and_weight_norm():
    model = nn.Sequential(
        nn.ConvTranspose1d(2, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(15, 3)),
    )
    x, y = data(2, 4)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def state(model):
    return (
        {n: (p.requires_grad, p.grad, p._version) for n, p in model.named_parameters()},
        {n: b.clone() for n, b in model.named_buffers()},
        [(m.training, dict(m._forward_hooks), "forward" in m.__dict__) for m in model.modules()],
    )


def test_model_is_left_as_it_was_even_after_an_error():
    model = to_gaussian(nn.Sequential(mlp(6, (5,), 4), nn.LayerNorm(4), nn.Dropout(0.5)))
    model[1].bias.requires_grad_(False)
    x, y = data(6)
    before = state(model)
    seed, generator = torch.get_rng_state(), torch.Generator().manual_seed(1)
    attached = attach(model, "categorical", generator=generator)
    attached.probe(x, y)
    assert torch.equal(seed, torch.get_rng_state())
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())
    attached(x, y).weighted_sum(torch.ones(4))
    assert state(model) == before
    with pytest.raises(UnsupportedModel):
        attach(model, lambda outputs, y: outputs.mean())(x, y)
    assert state(model) == before
    assert torch.backends.mha.get_fastpath_enabled()


def test_probe_does_not_look_at_the_data():
    """Non-finite or extreme real data does not change what the probe does."""
    model = mlp(6, (5,), 3)
    x, y = data(6)
    attach(model, "categorical")(torch.full_like(x, float("nan")), y).norms()


def test_dropout_masks_are_the_same_for_norm_and_sum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 3))
    x, y = data(6, size=5)
    attached = attach(model, "categorical")
    attached.probe(x, y)
    torch.manual_seed(3)
    c = attached(x, y)
    w = torch.linspace(0.2, 1.0, 5)
    torch.manual_seed(3)
    nll = nn.functional.cross_entropy(model(x), y, reduction="none")
    expected = torch.autograd.grad((w * nll).sum(), list(model.parameters()))
    for got, want in zip(c.weighted_sum(w).values(), expected, strict=True):
        torch.testing.assert_close(got, want)
    for i in range(5):
        alone = torch.cat([v.flatten() for v in c.weighted_sum(torch.eye(5)[i]).values()])
        assert alone.norm() <= c.norms()[i] <= alone.norm() * 1.001


def test_every_trainable_parameter_is_released():
    model = nn.Sequential(mlp(6, (5,), 4), nn.LayerNorm(4), Scaled2())
    c = attach(model, "categorical")(*data(6))
    assert set(c.weighted_sum(torch.ones(4))) == {n for n, _ in model.named_parameters()}


class Scaled2(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def test_the_package_is_callable_and_forgets_dead_models():
    model = mlp(6, (5,), 3)
    x, y = data(6)
    c = dpbnn.contributions(model, "categorical", x, y)
    assert_matches(c, per_example(model, "categorical", x, y))
    assert len(dpbnn.contributions.attach.__module__)
    dead = weakref.ref(model)
    del model, c
    gc.collect()
    assert dead() is None


def test_bad_arguments_name_the_cure():
    model = mlp(6, (5,), 3)
    for options in ({"space": "mu"}, {"draws": 0}, {"microbatch_size": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            attach(model, "categorical", **options)
    with pytest.raises(ValueError, match="data_free"):
        attach(model, "categorical", data_free={"nope": torch.ones(1)})(*data(6))
    with pytest.raises(ValueError, match="rows"):
        attach(model, "categorical")(data(6)[0], torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("x", [[[0.0] * 6] * 4, torch.tensor(0.0), (torch.zeros(4, 6), 3)])
def test_inputs_are_tensors_with_a_row_per_example(x):
    with pytest.raises(TypeError, match="give tensors with a row per example"):
        attach(nn.Linear(6, 3), "categorical")(x, torch.zeros(4, dtype=torch.long))


class Folded(nn.Module):
    """Puts the two images of an example side by side on the batch axis of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(2 * 4, 3)

    def forward(self, x):
        z = self.layer(x.flatten(0, 1)).flatten(1).mean(1, keepdim=True).expand(-1, 4)
        return self.head(z.reshape(len(x), -1))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 4, 3), nn.GroupNorm(1, 1), nn.ConvTranspose2d(1, 4, 3)]
)
def test_layers_that_need_one_row_per_example_say_so(layer):
    x, y = data(2, 1, 5, 5)
    with pytest.raises(UnsupportedModel, match=r"'layer' .*several rows per example"):
        attach(Folded(layer), "categorical")(x, y)


def test_gaussian_draws_come_from_their_generator_only():
    model = nn.Sequential(GaussianLinear(6, 3))
    x, y = data(6)
    attached = attach(model, "categorical", generator=torch.Generator().manual_seed(0))
    attached.probe(x, y)
    before = torch.get_rng_state()
    one = attached(x, y)
    assert torch.equal(before, torch.get_rng_state())
    again = attach(model, "categorical", generator=torch.Generator().manual_seed(0))(x, y)
    assert torch.equal(one.draws[0]["0.weight"], again.draws[0]["0.weight"])


def test_deep_copies_of_a_model_are_attached_apart():
    model = mlp(6, (5,), 3)
    x, y = data(6)
    first = dpbnn.contributions(model, "categorical", x, y)
    second = dpbnn.contributions(copy.deepcopy(model), "categorical", x, y)
    torch.testing.assert_close(first.norms(), second.norms())


class TurnedByRounding(nn.Module):
    """A maximum of two equal numbers, one of which kernels round up for odd batches in float32."""

    def __init__(self, couples=False):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)
        self.two.load_state_dict(self.one.state_dict())
        self.couples = couples

    def forward(self, x):
        one = self.one(x)
        if len(x) % 2 and (self.couples or x.dtype == torch.float32):
            one = one * (1 + 4 * torch.finfo(x.dtype).eps)
        return torch.maximum(one, self.two(x))


def test_a_maximum_that_turns_by_rounding_is_no_coupling():
    torch.manual_seed(0)
    attached = attach(TurnedByRounding(), "categorical")
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    assert attached(x, y).norms().shape == (5,)


def test_a_maximum_that_turns_by_the_batch_size_is_refused_in_float64_too():
    torch.manual_seed(0)
    attached = attach(TurnedByRounding(couples=True), "categorical")
    with pytest.raises(UnsupportedModel, match="depends on the other examples"):
        attached(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
