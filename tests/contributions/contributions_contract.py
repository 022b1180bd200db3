"""What every Contributions implementation promises, checked against float64 gradients."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpbnn.contributions import Contributions
from dpbnn.contributions.attach import _log_prob

Truth = dict[str, Tensor]


def per_example(model: nn.Module, likelihood, x, y: Tensor) -> Truth:
    """Return the gradients of every example's negative log-likelihood, in float64, one by one."""
    model = copy.deepcopy(model).double()
    log_prob, inputs = _log_prob(likelihood), x if isinstance(x, tuple) else (x,)
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    leaves = {n: p for n, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(y)):
        nll = -log_prob(model(*(t[i : i + 1] for t in inputs)), _double(y[i : i + 1])).sum()
        found = torch.autograd.grad(nll, list(leaves.values()), allow_unused=True)
        rows.append(
            [
                torch.zeros_like(p) if g is None else g
                for g, p in zip(found, leaves.values(), strict=True)
            ]
        )
    return {name: torch.stack([row[i] for row in rows]) for i, name in enumerate(leaves)}


def gaussian_truth(plain, gaussian, likelihood, x, y, draws, space, data_free=None) -> Truth:
    """Return the mean gradient over draws of a converted model, through the plain one."""
    plain, gaussian = copy.deepcopy(plain).double(), copy.deepcopy(gaussian).double()
    log_prob, total = _log_prob(likelihood), {}
    mus = {n.removesuffix("_mu"): p for n, p in gaussian.named_parameters() if n.endswith("_mu")}
    others = {
        n: p
        for n, p in gaussian.named_parameters()
        if not n.endswith(("_mu", "_rho")) and p.requires_grad
    }
    for draw in draws:
        assert draw.keys() == mus.keys()
        weights = {}
        for name, mu in mus.items():
            rho = gaussian.get_parameter(f"{name}_rho")
            weights[name] = mu + nn.functional.softplus(rho) * draw[name].double()
        if space == "weights":
            weights = {name: w.detach().requires_grad_() for name, w in weights.items()}
            leaves = weights | others
        else:
            leaves = {n: p for n, p in gaussian.named_parameters() if p.requires_grad}
        for i in range(len(y)):
            out = functional_call(plain, weights | others, (x[i : i + 1].double(),))
            nll = -log_prob(out, _double(y[i : i + 1])).sum() / len(draws)
            found = torch.autograd.grad(nll, list(leaves.values()), retain_graph=True)
            for name, value in zip(leaves, found, strict=True):
                rows = total.setdefault(name, [torch.zeros_like(value) for _ in y])
                rows[i] = rows[i] + value
    constants = data_free or {}
    return {
        n: torch.stack(rows) + (constants[n].double() if n in constants else 0.0)
        for n, rows in total.items()
    }


def _double(y: Tensor) -> Tensor:
    return y.double() if y.is_floating_point() else y


def flat(values: dict[str, Tensor], names) -> Tensor:
    return torch.cat([values[n].detach().double().flatten(1) for n in names], 1)


def assert_matches(c: Contributions, truth: Truth, sums: float = 1e-5, low=1e-6, high=1e-3) -> None:
    """Assert norms in [1 - low, 1 + high] of the truth, sums and inner products close to it."""
    assert set(c.shapes) == set(truth)
    matrix = flat(truth, c.shapes)
    size = len(matrix)
    norms, expected = c.norms().double(), matrix.norm(dim=1)
    assert (norms >= expected * (1 - low)).all(), (norms / expected).min()
    assert (norms <= expected * (1 + high) + 1e-12).all(), (norms / expected).max()
    for name, squared in c.squared_norms().items():
        part = truth[name].flatten(1).norm(dim=1)
        assert (squared.sqrt() >= part * (1 - low) - 1e-6 * expected).all(), name
        assert (squared.sqrt() <= part * (1 + high) + high / 2 * expected).all(), name
    w = torch.linspace(-0.5, 1.5, size)
    result = c.weighted_sum(w.clone().requires_grad_())
    assert not any(t.requires_grad for t in (norms, *result.values()))
    assert {n: v.shape for n, v in result.items()} == dict(c.shapes)
    assert all(v.dtype in (torch.float32, torch.float64) for v in result.values())
    scale = (w.abs().double()[:, None] * matrix.abs()).sum(0).norm()
    wanted = w.double() @ matrix
    got = torch.cat([v.double().flatten() for v in result.values()])
    assert (got - wanted).norm() <= sums * scale
    named = {n: torch.linspace(k, 1.0, size) for k, n in enumerate(c.shapes)}
    grouped = c.weighted_sum(named)
    for name, weights in named.items():
        part = truth[name].double().flatten(1)
        distance = (grouped[name].double().flatten() - weights.double() @ part).norm()
        assert distance <= sums * ((weights.abs().double() @ part.abs()).norm() + scale), name
    gram = matrix @ matrix.T
    assert (c.gram() - gram).abs().max() <= 2 * sums * gram.diagonal().max() + 1e-12


class ContributionsContract(ABC):
    """Inherited by the tests of every implementation."""

    @abstractmethod
    def make(self, batch: int) -> tuple[Contributions, Truth]:
        """Return contributions of that many examples, and their truth."""

    @abstractmethod
    def make_with(self, value: float) -> tuple[Contributions, Truth]:
        """Return contributions of five examples, the third spoilt by a value; truth without it."""

    def test_norms_sums_and_gram_match_float64(self):
        assert_matches(*self.make(5))

    def test_chunks_make_up_the_batch(self):
        c, _ = self.make(5)
        pieces = list(c.chunks())
        assert sum(p.batch_size for p in pieces) == c.batch_size == 5
        norms = torch.cat([p.norms() for p in pieces])
        torch.testing.assert_close(norms, c.norms())
        w, start, total = torch.linspace(0.1, 1, 5), 0, None
        for piece in pieces:
            part = piece.weighted_sum(w[start : start + piece.batch_size])
            total = part if total is None else {n: total[n] + part[n] for n in part}
            start += piece.batch_size
        for name, value in c.weighted_sum(w).items():
            torch.testing.assert_close(value, total[name], rtol=1e-5, atol=1e-6)

    def test_empty_batch_has_empty_norms_and_zero_sums(self):
        c, _ = self.make(0)
        assert c.batch_size == 0
        assert c.norms().shape == (0,)
        assert c.gram().shape == (0, 0)
        result = c.weighted_sum(torch.zeros(0))
        assert {n: v.shape for n, v in result.items()} == dict(c.shapes)
        assert all((v == 0).all() for v in result.values())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
    def test_non_finite_or_huge_examples_count_as_zero(self, value):
        c, truth = self.make_with(value)
        assert c.norms()[2] == 0
        assert (c.norms()[[0, 1, 3, 4]] > 0).all()
        result = c.weighted_sum(torch.ones(5))
        matrix = flat(truth, c.shapes)
        got = torch.cat([v.double().flatten() for v in result.values()])
        assert got.isfinite().all()
        assert (got - matrix.sum(0)).norm() <= 1e-5 * matrix.abs().sum(0).norm()
        assert c.gram().isfinite().all()
        assert (c.gram()[2] == 0).all()

    def test_wrong_weights_are_refused(self):
        c, _ = self.make(5)
        with pytest.raises(ValueError, match="one per example"):
            c.weighted_sum(torch.ones(4))
        with pytest.raises(ValueError, match="were given"):
            c.weighted_sum({"nonsense": torch.ones(5)})
