"""DP Bayes by Backprop: a mean-field Gaussian posterior by reparametrised gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.contributions.attach import public
from dpbnn.contributions.dense import Contributions, Draws
from dpbnn.methods.descent import Descent, DescentProcess, DescentState
from dpbnn.methods.method import Problem, own_priors
from dpbnn.networks import GaussianLayer, IntegratedLinear, to_gaussian
from dpbnn.posteriors import MeanFieldPosterior, Posterior
from dpbnn.priors import Prior
from dpbnn.privacy.checks import check_count, check_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class BBP(Descent):
    """Bayes by Backprop, q(w) = N(mu, softplus(rho)^2).

    By default in weight space (the DP-BBB note, corrected): at one draw w = mu + softplus(rho) e
    per batch an example contributes its gradient with respect to w, clipped in d dimensions; the
    rest is post-processing, with G = (n/b) release and s the logistic function:

        grad mu  = (G + dKL/dmu) / n,    grad rho = (G * e * s(rho) + dKL/drho) / n.

    With `space="parameters"` (Algorithm 3 of the DP-BNN paper) an example contributes the mean over
    `draws` of the gradient of nll + kl_weight * (log q(w) - log p(w)) with respect to (mu, rho)
    jointly, the KL term inside the clip. Either way the sensitivity is the clip.

    Attributes:
        rho: initial rho; -5 is a standard deviation of 0.0067.
        space: "weights" or "parameters".
        draws: weight draws a batch; more than one needs "parameters".
        kl: "exact" where the prior has a closed form, else "sampled" at the drawn weights.
        kl_weight: weight of the KL term in one example's loss, for "parameters"; None is 1/n. The
            paper prints 1.
    """

    rho: float = -5.0
    space: str = "weights"
    draws: int = 1
    kl: str = "exact"
    kl_weight: float | None = None

    name = "bbp"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.space not in ("weights", "parameters"):
            raise ValueError(f"space={self.space!r}: must be 'weights' or 'parameters'")
        if self.kl not in ("exact", "sampled"):
            raise ValueError(f"kl={self.kl!r}: must be 'exact' or 'sampled'")
        check_count(draws=self.draws)
        check_numbers(kl_weight=self.kl_weight)
        if self.draws > 1 and self.space == "weights":
            raise ValueError(f"draws={self.draws}: must be 1, or more with space='parameters'")
        if self.kl_weight is not None and (self.space == "weights" or self.kl_weight < 0):
            raise ValueError(
                f"kl_weight={self.kl_weight}: must be >= 0 and goes with space='parameters'; in "
                f"weight space the KL is outside the clip and weighted by the library"
            )

    @classmethod
    def paper(cls, draws: int = 1, kl_weight: float | None = 1.0, **settings: Any) -> BBP:
        """Return Algorithm 3 of the DP-BNN paper, as printed unless kl_weight is changed.

        Args:
            draws: N, weight draws averaged in one example's gradient.
            kl_weight: 1 as printed, where every example's loss has the whole KL; None is 1/n.
            settings: further settings; the paper's are learning_rate=0.25, clip=1.5.
        """
        defaults = {"learning_rate": 0.25, "clip": 1.5}
        return cls(
            space="parameters",
            draws=draws,
            kl="sampled",
            kl_weight=kl_weight,
            **{**defaults, **settings},
        )

    def check_units(self) -> None:
        """Raise where the KL is inside the clip: it would count once per record."""
        if self.space == "parameters":
            raise ValueError(
                "units: with space='parameters' the KL is inside the clip, once per record; use "
                "space='weights'"
            )

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network with Gaussian layers."""
        if any(isinstance(m, GaussianLayer) for m in model.modules()):
            return model
        gaussian = to_gaussian(model, rho=self.rho)
        if not any(isinstance(m, GaussianLayer) for m in gaussian.modules()):
            raise ValueError(
                "BBP needs Linear or Conv2d layers, which can have Gaussian weights, and this "
                "model has none that is trainable; unfreeze one, or use SGLD or MCDropout"
            )
        return gaussian

    def start(self, problem: Problem) -> BBPProcess:
        """Return the process that trains on a problem."""
        return BBPProcess(self, problem)


def kl_gradient(
    model: nn.Module,
    prior: Prior,
    draws: Draws | None = None,
    slopes: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the gradient of KL(q || p) with respect to (mu, rho), by parameter name.

    Exactly, or with `draws` by the estimate mean_j [log q(w_j) - log p(w_j)] at w_j = mu +
    softplus(rho) e_j, whose entropy part is exact too. Point parameters get the gradient of their
    prior, frozen ones none. `slopes` gets the derivative of every standard deviation by its rho.
    """
    result: dict[str, Tensor] = {}
    drawn, one = set(), next(model.parameters()).new_ones(())
    for path, layer in model.named_modules():
        if not isinstance(layer, (GaussianLayer, IntegratedLinear)):
            continue
        for which in layer.drawn_names():
            name = f"{path}.{which}".strip(".")
            mu, rho = (getattr(layer, f"{which}_{part}").detach() for part in ("mu", "rho"))
            drawn |= {f"{name}_mu", f"{name}_rho"}
            std, slope = F.softplus(rho), torch.sigmoid(rho)
            exact = prior.cross_entropy_gradient(mu, std) if draws is None else None
            if exact is not None:
                by_mu, by_std = exact
            else:
                assert draws is not None
                samples = [(draw[name], prior.gradient(mu + std * draw[name])) for draw in draws]
                by_mu = torch.stack([g for _, g in samples]).mean(0)
                by_std = torch.stack([g * e for e, g in samples]).mean(0)
            result[f"{name}_mu"] = by_mu
            by_std = torch.addcdiv(by_std, one, std, value=-1)
            result[f"{name}_rho"] = by_std.mul_(slope)
            if slopes is not None:
                slopes[name] = slope
    own = own_priors(model, prior)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            result.pop(name, None)
        elif name not in drawn:
            result[name] = own.get(name, prior).gradient(parameter.detach())
    return result


class DrawnWeights(DescentProcess):
    """Draws weights once a step, for all of its records."""

    def draw(self, state: DescentState) -> DescentState:
        """Return the state with fresh draws of the weights."""
        return dataclasses.replace(state, drawn=self.attached.draw())

    def contribute(self, state: DescentState, x: Any, y: Tensor) -> Contributions:
        """Return what the examples of a batch contribute at the draws."""
        return self.attached(x, y, draws=state.drawn)


class BBPProcess(DrawnWeights):
    """Equations of `BBP`."""

    settings: BBP

    def __init__(self, settings: BBP, problem: Problem) -> None:
        self.inside = settings.space == "parameters"
        one = torch.ones(1)
        closed = problem.prior.cross_entropy_gradient(one, one) is not None
        self.exact = settings.kl == "exact" and closed
        weight = 1 / problem.n if settings.kl_weight is None else settings.kl_weight

        def kl_term(draws: Draws) -> dict[str, Tensor]:
            terms = kl_gradient(problem.model, problem.prior, None if self.exact else draws)
            return {name: weight * value for name, value in terms.items()}

        attached = problem.attach(
            space="parameters" if self.inside else "weights",
            draws=settings.draws,
            data_free=kl_term if self.inside else None,
        )
        super().__init__(settings, problem, attached)

    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the negative evidence lower bound, over n."""
        n, b = self.problem.n, self.problem.batch_size
        if self.inside:
            return {name: release[name] / b for name in state.parameters}
        draws = public(state.drawn)
        slopes: dict[str, Tensor] = {}
        kl = kl_gradient(self.model, self.problem.prior, None if self.exact else draws, slopes)
        shares = torch._foreach_div([kl[name] for name in state.parameters], n)
        result = dict(zip(state.parameters, shares, strict=True))
        for name, found in result.items():
            weight, _, part = name.rpartition("_")
            if weight in release and part == "mu":
                found.add_(release[weight], alpha=1 / b)
            elif weight in release and part == "rho":
                at_draw = release[weight] * draws[0][weight]
                found.addcmul_(at_draw, slopes[weight], value=1 / b)
            else:
                found.add_(release[name], alpha=1 / b)
        return result

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the mean-field Gaussian."""
        return MeanFieldPosterior.of(self.final(state), self.problem.likelihood, **record)
