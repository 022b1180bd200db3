"""DP-SEP's columns without privacy: SEP with clipping and no noise, and variational inference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpbnn.likelihoods import Gaussian
from dpbnn.methods.ep import EP, EPProcess, SequentialState
from dpbnn.methods.method import Method, OpenProcess, Problem
from dpbnn.methods.state import State
from dpbnn.posteriors import MeanFieldPosterior, Posterior
from dpbnn.priors import Gaussian as Normal
from dpbnn.privacy.checks import check_count, check_positive
from dpbnn.privacy.plan import Plan

__all__ = ["ClippedSEP", "PlainVI"]

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedSEP(EP):
    """The paper's clipped SEP: Algorithm 3 without noise, at the damping of SEP; not private.

        q <- q + clip(f_n) - f,   q = clip(prior) f^N

    in natural parameters, means and precisions as one vector of norm C at most. The damping 1/N of
    Li et al. gives a factor the weight 1 in q; the printed equation 5 gives it gamma/N. The clipped
    prior stays as it is, since a prior that is learned again would not be clipped; the noise is
    learned, where the paper's code takes what another run without privacy has learned.

    Attributes:
        clip: C, the largest norm of a factor and of the prior.
        factors: whether factors are clipped; if not, the prior alone is, as in the paper's code.
    """

    damping: float = 1.0
    shared: bool = True
    refine: bool = False
    clip: float = 1.0
    factors: bool = True

    name = "clipped-sep"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(clip=self.clip)

    def start(self, problem: Problem) -> ClippedSEPProcess:
        """Return the process that trains on a problem."""
        problem.refuse_frozen("expectation propagation")
        return ClippedSEPProcess(self, problem)


class ClippedSEPProcess(EPProcess):
    """Equations of `ClippedSEP`."""

    settings: ClippedSEP

    def begin(self) -> SequentialState:
        """Return the start of SEP, with all that the clipped prior lacks in the shared factor."""
        state, n = super().begin(), self.problem.n
        _, prior = self._clipped(np.zeros_like(state.second), state.prior.second)
        first, second = self.factor(state.first / n, (state.second - prior) / n)
        return dataclasses.replace(
            state,
            first=n * first,
            second=prior + n * second,
            sites=(first[None], second[None], state.sites[2]),
        )

    def factor(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Return a factor scaled to norm C at most, where factors are clipped."""
        return self._clipped(first, second) if self.settings.factors else (first, second)

    def _clipped(self, first: Array, second: Array) -> tuple[Array, Array]:
        norm = math.sqrt(float(first @ first + second @ second))
        scale = min(1.0, self.settings.clip / norm) if norm > 0 else 1.0
        return scale * first, scale * second


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainVI(Method):
    """Mean-field variational inference of a network with one hidden layer; not private.

        loss = mean over a batch of E_q[-log p(y | x, w)] + (beta/b) KL(q || prior)

    Appendix D of the paper: the output layer is integrated in closed form, the hidden one drawn L
    times. Records need no gradients of their own here, so that all draws are one product, and this
    is several times faster than `dpbnn.VI`. Every step of the plan is a pass over the records.
    With `Gaussian(None)` the noise's std is learned too, as a point.

    Attributes:
        learning_rate: of the optimizer; Adam's falls to zero by a cosine.
        optimizer: "sgd", with momentum 0.2 as in the paper's code, or "adam".
        batch_size: b, records a step; those left over by a pass are left out.
        draws: L.
        beta: of the KL as in the paper's code; None is b/n, the evidence lower bound.
        rho: first value of every rho; the std of a weight is softplus(rho).
    """

    learning_rate: float = 0.01
    optimizer: str = "adam"
    batch_size: int = 100
    draws: int = 10
    beta: float | None = None
    rho: float = -3.0

    name = "plain-vi"
    own_noise = True

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate)
        check_count(batch_size=self.batch_size, draws=self.draws)
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f"optimizer={self.optimizer!r}: must be 'adam' or 'sgd'")

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan, which must be open."""
        if plan.private:
            raise ValueError("PlainVI is not private; use dpbnn.VI, or dpbnn.open_plan(...)")
        return plan, math.inf

    def start(self, problem: Problem) -> PlainVIProcess:
        """Return the process that trains on a problem."""
        return PlainVIProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainVIState(State):
    """State of `PlainVI`; the network itself stays as it was.

    Attributes:
        mean: by parameter.
        rho: likewise.
        noise: logarithm of the noise's std.
        optimizer: of torch.
    """

    mean: dict[str, Tensor]
    rho: dict[str, Tensor]
    noise: Tensor
    optimizer: torch.optim.Optimizer


class PlainVIProcess(OpenProcess[PlainVIState]):
    """Equations of `PlainVI`."""

    def __init__(self, settings: PlainVI, problem: Problem) -> None:
        super().__init__(problem)
        self.settings = settings
        layers = [m for m in problem.model.modules() if isinstance(m, nn.Linear)]
        likelihood, prior = problem.likelihood, problem.prior
        if not (
            len(layers) == 2 and isinstance(likelihood, Gaussian) and isinstance(prior, Normal)
        ):
            raise ValueError("PlainVI needs one hidden layer, Gaussian noise and a Gaussian prior")
        self.fixed, self.prior_std = likelihood.noise_std, prior.std

    def begin(self) -> PlainVIState:
        """Return the state before the first step."""
        settings, first = self.settings, self.problem.trainable()
        mean = {name: p.detach().clone().requires_grad_() for name, p in first.items()}
        rho = {name: torch.full_like(p, settings.rho).requires_grad_() for name, p in first.items()}
        noise = torch.tensor(math.log(self.fixed or 1.0), requires_grad=self.fixed is None)
        moved = [*mean.values(), *rho.values(), *([noise] if self.fixed is None else [])]
        optimizer: torch.optim.Optimizer
        if settings.optimizer == "adam":
            optimizer = torch.optim.Adam(moved, lr=settings.learning_rate)
        else:
            optimizer = torch.optim.SGD(moved, lr=settings.learning_rate, momentum=0.2)
        return PlainVIState(mean=mean, rho=rho, noise=noise, optimizer=optimizer)

    def visit(self, state: PlainVIState, x: Tensor, y: Tensor, records: Tensor) -> PlainVIState:
        """Pass over the records once, in a new random order."""
        settings, size = self.settings, min(self.settings.batch_size, len(x))
        inputs, targets = x.flatten(1), y.reshape(len(y))
        order, count = torch.randperm(len(x)), len(x) // size
        for step, part in enumerate(order[: count * size].split(size)):
            if settings.optimizer == "adam":
                done = (state.steps + step / count) / max(1, self.problem.steps)
                rate = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
                state.optimizer.param_groups[0]["lr"] = rate
            loss = self.expected_nll(state, inputs[part], targets[part])
            beta = size / self.problem.n if settings.beta is None else settings.beta
            loss = loss + beta / size * self.kl(state)
            state.optimizer.zero_grad()
            torch.autograd.backward(loss)
            state.optimizer.step()
        return dataclasses.replace(state, steps=state.steps + 1)

    def expected_nll(self, state: PlainVIState, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean of E_q[-log p(y | x, w)]; equation 121 of the paper, less a constant."""
        weight, bias, weight2, bias2 = (
            (mean, F.softplus(rho))
            for mean, rho in zip(state.mean.values(), state.rho.values(), strict=True)
        )
        draws = self.settings.draws
        w, b = (m + s * torch.randn(draws, *m.shape).to(m) for m, s in (weight, bias))
        hidden = F.relu(x @ w.mT + b.unsqueeze(1))
        mean = hidden @ weight2[0][0] + bias2[0]
        variance = hidden.square() @ weight2[1][0].square() + bias2[1].square()
        precision = torch.exp(-2 * state.noise)
        return 0.5 * precision * ((y - mean).square() + variance).mean() + state.noise

    def kl(self, state: PlainVIState) -> Tensor:
        """Return KL(q || prior)."""
        parts = []
        for mean, rho in zip(state.mean.values(), state.rho.values(), strict=True):
            ratio = (F.softplus(rho) / self.prior_std).square()
            parts.append((ratio + (mean / self.prior_std).square() - 1 - ratio.log()).sum())
        return 0.5 * torch.stack(parts).sum()

    def posterior(self, state: PlainVIState, **record: Any) -> Posterior:
        """Return the mean-field Gaussian."""
        std = {name: F.softplus(rho.detach()) for name, rho in state.rho.items()}
        model = self.problem.rebuilt(state.mean)
        return MeanFieldPosterior(model, Gaussian(float(state.noise.detach().exp())), std, **record)
