"""Norms are never rounded down: cancellation, reduced precision, large and small scales."""

import copy
import itertools

import broken_versions as broken
import pytest
import torch
from contributions_contract import assert_matches, per_example
from torch import nn

from dpbnn.contributions import attach, rules
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.rounding import BLOCK, rows_error, squares, summed_rows
from dpbnn.contributions.sites import Rows
from dpbnn.contributions.tape import Tape
from dpbnn.networks import mlp


class Opposed(nn.Module):
    """A linear layer whose two halves see the same input and opposite output gradients."""

    def __init__(self, width, bias):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        z = self.linear(x)
        half = x.shape[1] // 2
        return (z[:, :half].sum((1, 2)) - (1 + 2**-13) * z[:, half:].sum((1, 2))).unsqueeze(1)


def opposed(scale, width=64, half=8, bias=True, inputs=torch.randn):
    torch.manual_seed(0)
    x = scale * inputs(4, half, width)
    return Opposed(width, bias), torch.cat([x, x], 1), torch.zeros(4)


def identity(outputs, y):
    return -outputs[:, 0]


def never_below(model, x, y):
    expected = per_example(model, identity, x, y)
    expected = torch.cat([v.flatten(1) for v in expected.values()], 1).norm(dim=1)
    norms = attach(model, identity)(x, y).norms()
    return bool((norms >= expected * (1 - 1e-5)).all())


@pytest.mark.parametrize("form", [None, "gram", "instantiated"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("inputs", [torch.randn, torch.ones])
def test_cancelling_positions_are_not_rounded_down(inputs, scale, bias, form, monkeypatch):
    monkeypatch.setattr(Outer, "form", form)
    assert never_below(*opposed(scale, bias=bias, inputs=inputs))


@pytest.mark.parametrize(("width", "half"), [(1, 1), (64, 8)])
def test_a_naive_float32_gram_would_be_rounded_down(width, half, monkeypatch):
    """Inputs of one: the Gram norm is exactly 0 in float32, in whatever order a CPU sums up.

    `test_item_51_a_naive_gram_norm_is_zero_in_every_order_of_summation` shows it.
    """
    broken.gram_norms_are_taken_in_float32(monkeypatch)
    monkeypatch.setattr(Outer, "form", "gram")
    assert not never_below(*opposed(1.0, width, half, False, torch.ones))


@pytest.mark.parametrize("kind", ["conv", "norm", "embedding"])
def test_cancelling_positions_of_other_layers(kind):
    torch.manual_seed(0)
    layer = {
        "conv": nn.Conv1d(3, 5, 1),
        "norm": nn.Sequential(nn.Flatten(2), nn.GroupNorm(3, 3)),
        "embedding": nn.Embedding(7, 5),
    }[kind]
    x = torch.randn(4, 3, 8)
    x = torch.cat([x, x], 2) if kind != "embedding" else torch.randint(0, 7, (4, 8)).repeat(1, 2)

    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            z = self.layer(x)
            axis = 1 if kind == "embedding" else 2
            one, two = z.split(8, axis)
            return (one.sum((1, 2)) - (1 + 1e-4) * two.sum((1, 2))).unsqueeze(1)

    assert never_below(Halves(), x, torch.zeros(4))


LARGE_SMALL_LARGE = torch.tensor(list(itertools.permutations([2.0**55, 1.0, -(2.0**55)])))
"""Adds up to 1 exactly. In every order of summation, some rows add up to 0, also in float64."""


class Signalled(nn.Module):
    """A layer whose output at position t has the gradient signal_t, for one released parameter."""

    def __init__(self, kind):
        super().__init__()
        self.layer = {
            "linear": nn.Linear(2, 1),
            "conv": nn.Conv1d(1, 1, 1),
            "norm": nn.LayerNorm(1),
            "linear weight": nn.Linear(1, 1, bias=False),
            "conv weight": nn.Conv1d(1, 1, 1, bias=False),
            "embedding": nn.Embedding(3, 1),
        }[kind]
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(name == "bias" or kind not in ("linear", "conv", "norm"))

    def forward(self, x, signal):
        return (self.layer(x).flatten(1) * signal).sum(1, keepdim=True)


SHAPES = {
    "linear": (3, 2),
    "conv": (1, 3),
    "norm": (3, 1),
    "linear weight": (3, 1),
    "conv weight": (1, 3),
    "embedding": (3,),
}


def lossy_norms(kind):
    """Norms of six examples, the true one being 1, and those of their computed sums."""
    x = torch.ones(6, *SHAPES[kind], dtype=torch.long if kind == "embedding" else torch.float32)
    c = attach(Signalled(kind), identity)((x, LARGE_SMALL_LARGE), torch.zeros(6))
    sums = [torch.cat([v.flatten() for v in c.weighted_sum(one).values()]) for one in torch.eye(6)]
    return c.norms(), torch.stack(sums).norm(dim=1)


@pytest.mark.parametrize("kind", list(SHAPES))
def test_what_a_sum_over_positions_may_have_lost_is_in_the_norm(kind):
    norms, computed = lossy_norms(kind)
    assert (computed < 0.5).any()
    assert (norms >= 1).all()
    assert (norms >= computed).all()
    assert (norms <= 1e-6 * LARGE_SMALL_LARGE.norm(dim=1)).all()


@pytest.mark.parametrize("kind", list(SHAPES))
def test_without_a_bound_on_the_rounding_such_a_norm_would_be_zero(kind, monkeypatch):
    summed = rules.summed_positions

    def without_bound(*given):
        total, _, squared = summed(*given)
        return total, 0.0, squared

    monkeypatch.setattr(rules, "summed_positions", without_bound)
    monkeypatch.setattr(Rows, "slack", lambda self: 0.0)
    monkeypatch.setattr(Outer, "slack", lambda self: 0.0)
    norms, _ = lossy_norms(kind)
    assert (norms < 0.5).any()


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e6, 1e12])
def test_extreme_scales_keep_their_relative_accuracy(scale):
    model = nn.Linear(6, 1)
    x, y = scale * torch.randn(4, 6), torch.zeros(4)
    expected = per_example(model, identity, x, y)
    expected = torch.cat([v.flatten(1) for v in expected.values()], 1).norm(dim=1)
    norms = attach(model, identity)(x, y).norms()
    assert (norms >= expected * (1 - 1e-6)).all()
    assert (norms <= expected * (1 + 1e-3)).all()


@pytest.fixture
def _without_onednn():
    """Some virtual machines announce bfloat16 matrix instructions that they do not run."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.usefixtures("_without_onednn")
def test_norms_and_sums_under_bfloat16_autocast_are_float32():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 3))
    x, y = torch.randn(8, 64), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c = attach(model, "categorical")(x, y)
        sums, norms = c.weighted_sum(torch.ones(8)), c.norms()
    assert all(v.dtype == torch.float32 for v in sums.values())
    assert_matches(c, per_example(model, "categorical", x, y), sums=3e-2, low=3e-2, high=3e-2)
    for i in range(8):
        alone = c.weighted_sum(torch.eye(8)[i])
        actual = torch.cat([v.flatten() for v in alone.values()]).double().norm()
        assert actual <= norms[i] <= actual * 1.001


@pytest.mark.usefixtures("_without_onednn")
def test_inputs_under_autocast_are_held_once():
    """Autograd holds the cast input of a layer; the tape holds the same tensor, not another."""
    saved = []
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attached = attach(model, "categorical")
        x, y = torch.randn(8, 64), torch.randint(0, 3, (8,))
        attached(x, y)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            tapped = []
            with pytest.MonkeyPatch.context() as patch:
                tap = Tape.tap

                def noted(tape, path, a, *rest, **options):
                    tapped.append(a)
                    return tap(tape, path, a, *rest, **options)

                patch.setattr(Tape, "tap", noted)
                attached(x, y)
    assert tapped[-1].dtype is torch.bfloat16
    assert any(t.data_ptr() == tapped[-1].data_ptr() for t in saved)


@pytest.mark.usefixtures("_without_onednn")
def test_half_precision_model():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 3)
    ).bfloat16()
    x, y = torch.randn(8, 64).bfloat16(), torch.randint(0, 3, (8,))
    c = attach(model, "categorical")(x, y)
    assert all(v.dtype == torch.float32 for v in c.weighted_sum(torch.ones(8)).values())
    assert_matches(c, per_example(model, "categorical", x, y), sums=5e-2, low=5e-2, high=5e-2)


def test_clipped_example_stays_below_the_clip():
    """The float64 norm of every example's clipped contribution is at most the clip."""
    torch.manual_seed(0)
    model = mlp(20, (30, 30), 3)
    x, y = 5 * torch.randn(16, 20), torch.randint(0, 3, (16,))
    c = attach(model, "categorical")(x, y)
    w = (0.1 / c.norms()).clamp(max=1.0)
    for i in range(16):
        alone = c.weighted_sum(w * torch.eye(16)[i])
        assert torch.cat([v.flatten() for v in alone.values()]).double().norm() <= 0.1


@pytest.mark.usefixtures("_without_onednn")
def test_matrix_precision_settings_are_restored():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        model = mlp(20, (30,), 3)
        c = attach(model, "categorical")(torch.randn(4, 20), torch.tensor([0, 1, 2, 0]))
        c.weighted_sum(torch.ones(4))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("length", [0, 7, 1 << 14, (1 << 14) + 5, 3 << 14])
def test_squares_of_any_length(length):
    t = torch.randn(3, length, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(squares(t), t.double().square().sum(1), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1300, 4097])
@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3])
def test_sums_of_many_equal_rows_stay_within_the_bound(rows, value):
    """Equal rows round the same way again and again, the worst that rows do."""
    g, a = torch.full((rows, 2), value), torch.full((rows, 3), 0.7)
    a[1::2] *= 1e-3
    exact = g.double().T @ a.double()
    largest = (g[0].double().norm() * a[0].double().norm()).item()
    found = summed_rows(g, a)
    assert found.dtype == (torch.float32 if rows <= 512 else torch.float64)
    assert (found - exact).norm() <= rows_error(rows, torch.float32) * largest


def test_the_bound_grows_with_the_rows_and_is_small_where_it_must_be():
    for dtype in BLOCK:
        errors = [rows_error(rows, dtype) for rows in (0, 1, 2, 20, 300, 600, 5000, 10**5, 10**7)]
        assert errors == sorted(errors)
    assert rows_error(0, torch.float32) == 0
    assert rows_error(256, torch.float32) < 0.002
    assert rows_error(10**6, torch.float64) < 2e-4
    assert rows_error(20, torch.float32) < 401 * torch.finfo(torch.float32).eps / 2


class Scaled(nn.Module):
    """A module without a rule of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("positions", [False, True])
def test_layers_sum_more_than_a_block_of_examples_in_float64(positions):
    torch.manual_seed(0)
    if positions:
        x = torch.randint(0, 7, (BLOCK[torch.float32] + 9, 4))
        model = nn.Sequential(
            nn.Embedding(7, 5), nn.Linear(5, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3)
        )
    else:
        x = torch.randn(BLOCK[torch.float32] + 9, 1, 6, 6)
        model = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 5, 4), nn.Flatten(), Scaled(),
            nn.Linear(5, 3),
        )  # fmt: skip
    y, w = torch.randint(0, 3, (len(x),)), torch.rand(len(x))
    sums = attach(model, "categorical")(x, y).weighted_sum(w)
    exact = copy.deepcopy(model).double()
    inputs = x if positions else x.double()
    expected = attach(exact, "categorical")(inputs, y).weighted_sum(w)
    for name, value in sums.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)
