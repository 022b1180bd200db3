"""Network contributions keep the contract, in every mode."""

import functools
from typing import ClassVar

import pytest
import torch
from contributions_contract import ContributionsContract, gaussian_truth, per_example
from torch import nn

from dpbnn.contributions import attach, outer
from dpbnn.contributions.outer import Outer
from dpbnn.networks import SteepTanh, cnn, mlp, to_gaussian


def data(batch, *shape):
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, *shape, generator=g), torch.randint(0, 3, (batch,), generator=g)


class NetworkContract(ContributionsContract):
    options: ClassVar[dict] = {}
    shape = (6,)

    def model(self):
        torch.manual_seed(0)
        return mlp(6, (8, 7), 3, activation=nn.Tanh)

    def truth(self, model, x, y, c):
        return per_example(model, "categorical", x, y)

    def make(self, batch):
        x, y = data(batch, *self.shape)
        model = self.model()
        self.attached = attach(model, "categorical", **self.options)
        self.kept = model
        c = self.attached(x, y)
        return c, self.truth(model, x, y, c) if batch else {}

    def make_with(self, value):
        x, y = data(5, *self.shape)
        model = self.model()
        self.kept = model
        x[2] = value
        c = attach(model, "categorical", **self.options)(x, y)
        keep = [0, 1, 3, 4]
        return c, self.truth(model, x[keep], y[keep], c)


class TestMLP(NetworkContract):
    pass


class TestLinearPath(NetworkContract):
    def model(self):
        torch.manual_seed(0)
        return mlp(6, (8, 7), 3, activation=nn.Tanh, linear_path=True)


class TestSteps(NetworkContract):
    def model(self):
        torch.manual_seed(0)
        return mlp(6, (8,), 3, activation=nn.Tanh, linear_path=True, steps=0.5)


class TestSteepUnits(NetworkContract):
    def model(self):
        torch.manual_seed(0)
        return mlp(6, (8,), 3, activation=functools.partial(SteepTanh, 2.0), linear_path=True)


class TestMicrobatched(NetworkContract):
    options: ClassVar[dict] = {"microbatch_size": 2}


class TestCNN(NetworkContract):
    shape = (1, 28, 28)

    def model(self):
        torch.manual_seed(0)
        return cnn(nn.Tanh, outputs=3)


class TestCNNInChunks(TestCNN):
    """Instantiated gradients are kept in chunks of one example."""

    @pytest.fixture(autouse=True)
    def chunks(self, monkeypatch):
        monkeypatch.setattr("dpbnn.contributions.sites.CHUNK", 1)

    def test_kept_gradients_stand_for_the_recorded_tensors(self):
        c, _ = self.make(4)
        c.norms()
        kept = [site for site in c._sites if isinstance(site, Outer) and site._kept is not None]
        assert len(kept) == 2
        assert all(len(s._kept) == 4 and not s.terms[0].a.numel() for s in kept)
        before = c.weighted_sum(torch.ones(4))
        c.gram()
        for name, value in c.weighted_sum(torch.ones(4)).items():
            torch.testing.assert_close(value, before[name])


class TestSequence(NetworkContract):
    shape = (5, 6)

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.Tanh(),
            nn.Linear(8, 4),
            nn.Flatten(),
            nn.Linear(20, 3),
        )


class GaussianContract(NetworkContract):
    def model(self):
        self.plain = super().model()
        return to_gaussian(self.plain, rho=-1.0)

    def truth(self, model, x, y, c):
        constants = self.options.get("data_free")
        constants = constants(c.draws) if constants else None
        return gaussian_truth(
            self.plain, model, "categorical", x, y, c.draws, self.options["space"], constants
        )


class TestGaussianWeights(GaussianContract):
    options: ClassVar[dict] = {"space": "weights"}


class TestGaussianParameters(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters"}


class TestGaussianDraws(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters", "draws": 3}


class TestGaussianManyDraws(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters", "draws": 9}


def constants(draws):
    g = torch.Generator().manual_seed(3)
    return {
        f"{name}_{p}": 0.5 * torch.randn(e.shape, generator=g)
        for name, e in draws[0].items()
        for p in ("mu", "rho")
    }


class TestGaussianDataFree(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters", "data_free": constants}


class TestGaussianDrawsDataFree(GaussianContract):
    options: ClassVar[dict] = {
        "space": "parameters",
        "data_free": constants,
        "draws": 2,
        "microbatch_size": 3,
    }


class TestGaussianConvolution(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters", "data_free": constants}
    shape = (2, 6, 6)

    def model(self):
        torch.manual_seed(0)
        self.plain = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(36, 3),
        )
        return to_gaussian(self.plain, rho=-1.0)


class TestGaussianSequenceDraws(GaussianContract):
    options: ClassVar[dict] = {"space": "parameters", "draws": 2}
    shape = (4, 6)

    def model(self):
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3))
        return to_gaussian(self.plain, rho=-1.0)


def test_a_draw_is_shared_by_norms_sums_and_chunks():
    model = to_gaussian(mlp(6, (8,), 3), rho=0.0)
    x, y = data(7, 6)
    attached = attach(model, "categorical", generator=torch.Generator().manual_seed(0))
    whole = attached(x, y)
    attached = attach(
        model, "categorical", generator=torch.Generator().manual_seed(0), microbatch_size=2
    )
    chunked = attached(x, y)
    assert all(torch.equal(e, chunked.draws[0][n]) for n, e in whole.draws[0].items())
    torch.testing.assert_close(whole.norms(), chunked.norms(), rtol=1e-5, atol=0)
    assert torch.equal(whole.norms(), whole.norms())
    first, second = chunked.weighted_sum(torch.ones(7)), chunked.weighted_sum(torch.ones(7))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_data_free_cross_term_is_counted():
    """A data-free gradient opposite to an example's is not counted as if orthogonal."""
    model = nn.Linear(3, 2, bias=False)
    x, y = torch.randn(1, 3), torch.tensor([1])
    truth = per_example(model, "categorical", x, y)["weight"][0]
    for factor in (-1.0, -0.9, 1.0):
        constant = {"weight": (factor * truth).float()}
        norm = attach(model, "categorical", data_free=constant)(x, y).norms()
        expected = (truth + constant["weight"].double()).norm()
        assert norm >= expected * (1 - 1e-6)
        assert norm <= expected * (1 + 1e-3) + 5e-3 * truth.norm()


def test_without_the_cross_term_norms_would_be_too_small(monkeypatch):
    monkeypatch.setattr(Outer, "_cross", lambda self, index, constant: 0.0)
    model = nn.Linear(3, 2, bias=False)
    x, y = torch.randn(1, 3), torch.tensor([1])
    truth = per_example(model, "categorical", x, y)["weight"][0]
    norm = attach(model, "categorical", data_free={"weight": truth.float()})(x, y).norms()
    assert norm < 2 * truth.norm() * 0.9


def cancelled_norms():
    """Norms of 32 examples whose data-free part is their gradient, negative, up to 1e-5."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30, bias=False)
    x, y = torch.randn(32, 40), torch.randint(0, 30, (32,))
    truth = per_example(model, "categorical", x, y)["weight"]
    attached = attach(model, "categorical")
    norms, expected = [], []
    for i in range(32):
        constant = (-truth[i] * (1 + 1e-5)).float()
        norms.append(attached(x[i : i + 1], y[i : i + 1], {"weight": constant}).norms())
        expected.append((truth[i] + constant.double()).norm())
    return torch.cat(norms), torch.stack(expected), truth.flatten(1).norm(dim=1)


def test_a_data_free_part_that_cancels_the_example_is_not_rounded_away():
    norms, expected, size = cancelled_norms()
    assert (norms >= expected).all()
    assert (norms <= 5e-3 * size).all()


def cancelled_product(scale=1.0):
    """The norm of a layer of one weight, and what is released of it.

    Input 1 + 5u, constant -(1 + 6u), u = 2^-14. Their product 1 + 11u + 30u^2 is rounded up to
    1 + 11u + 32u^2 on every CPU, so that |c|^2 = u^2 comes out as (25 - 2 * 32 + 36) u^2 < 0.
    """
    x = torch.full((1, 1), scale * (1 + 5 * 2**-14))
    constant = {"weight": torch.full((1, 1), -scale * (1 + 6 * 2**-14))}
    attached = attach(nn.Linear(1, 1, bias=False), lambda outputs, y: -outputs[:, 0])
    c = attached(x, torch.zeros(1), constant)
    return c.norms(), abs(float(c.weighted_sum(torch.ones(1))["weight"]))


@pytest.mark.parametrize("form", [None, "instantiated"])
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_one_product_that_a_data_free_part_cancels_is_not_rounded_away(form, scale, monkeypatch):
    monkeypatch.setattr(Outer, "form", form)
    norm, released = cancelled_product(scale)
    assert released == scale * 2**-14
    assert norm >= released


def test_the_rounding_of_what_a_data_free_part_cancels_is_in_the_norm(monkeypatch):
    """Three weights of 1/3 in the input, back-signals of 1/5: their products are rounded."""
    monkeypatch.setattr(Outer, "form", "instantiated")
    model, x = nn.Linear(3, 1, bias=False), torch.full((1, 3), 1 / 3)
    exact = x.double() * torch.tensor(0.2).double()
    c = attach(model, lambda outputs, y: -0.2 * outputs[:, 0], data_free={"weight": -exact.float()})
    assert c(x, torch.zeros(1)).norms() >= (exact - exact.float().double()).norm() > 0


def test_without_a_bound_on_the_rounding_the_cancelled_norm_would_be_too_small(monkeypatch):
    monkeypatch.setattr(outer, "sum_error", lambda terms, dtype: 0.0)
    norm, released = cancelled_product()
    assert norm < 0.9 * released


def test_microbatches_replay_dropout_masks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    x, y = data(6, 6)
    c = attach(model, "categorical", microbatch_size=2)(x, y)
    before = torch.get_rng_state()
    norms = c.norms()
    assert not torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(norms, c.norms(), rtol=0, atol=0)
    one_hot = torch.eye(6)
    for i in range(6):
        total = c.weighted_sum(one_hot[i])
        norm = torch.cat([v.flatten() for v in total.values()]).double().norm()
        assert norm <= norms[i] <= norm * 1.001


def test_norms_are_cheap_to_ask_for_twice():
    model = mlp(6, (8,), 3)
    c = attach(model, "categorical")(*data(3, 6))
    first, second = (c.squared_norms()["1.weight"] for _ in range(2))
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("space", ["weights", "parameters"])
def test_frozen_gaussian_parameters_are_not_released(space):
    model = to_gaussian(mlp(6, (8,), 3), rho=-1.0)
    model[1].requires_grad_(False)
    model[3].weight_rho.requires_grad_(False)
    c = attach(model, "categorical", space=space)(*data(3, 6))
    if space == "weights":
        assert set(c.shapes) == {"3.weight", "3.bias"}
    else:
        assert set(c.shapes) == {"3.weight_mu", "3.bias_mu", "3.bias_rho"}
    assert set(c.weighted_sum(torch.ones(3))) == set(c.shapes)
