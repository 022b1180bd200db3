"""DP-VI: a mean-field Gaussian posterior with closed-form KL, and output layer where possible."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn.likelihoods import Gaussian, Likelihood
from dpbnn.methods.bbp import BBP, DrawnWeights, kl_gradient
from dpbnn.methods.descent import Descent, DescentState
from dpbnn.methods.method import Problem
from dpbnn.networks import GaussianLinear, IntegratedLinear
from dpbnn.posteriors import MeanFieldPosterior, Posterior
from dpbnn.privacy.checks import check_count, check_numbers


@dataclasses.dataclass(frozen=True)
class ExpectedGaussian:
    """Gaussian targets, averaged over an output layer of known mean and variance.

        E log N(y; f, s^2) = log N(y; E f, s^2) - Var f / (2 s^2)

    The DP-SEP paper, appendix D, equations 118 to 121. Outputs are (E f, Var f) side by side.
    """

    likelihood: Gaussian

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the expected log-probability, one number per example."""
        mean, variance = outputs.chunk(2, -1)
        assert self.likelihood.noise_std is not None
        spread = variance.flatten(1).sum(1) / (2 * self.likelihood.noise_std**2)
        return self.likelihood.log_prob(mean, y) - spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class VI(Descent):
    """Variational inference with a mean-field Gaussian; under a private plan it is DP-VI.

        grad = (1/b) release + (beta/n) grad KL(q || p),
        an example contributes the gradient of -E_q log p(y_i | x_i, w) with respect to (mu, rho),

    estimated with `draws` draws of the hidden layers. For a fixed Gaussian noise the output layer
    is integrated in closed form. The KL is exact and outside the clip; the sensitivity is the clip.

    Attributes:
        rho: initial rho of every weight.
        draws: L, weight draws a batch.
        beta: weight of the KL term; 1 is the evidence lower bound.
        integrate: whether a last Linear layer is integrated in closed form (Gaussian noise only).
    """

    rho: float = -3.0
    draws: int = 1
    beta: float = 1.0
    integrate: bool = True

    name = "vi"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(draws=self.draws)
        check_numbers(beta=self.beta)
        if not self.beta >= 0:
            raise ValueError(f"beta={self.beta}: must be >= 0")

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network with Gaussian layers."""
        return BBP(rho=self.rho).prepared(model)

    def start(self, problem: Problem) -> VIProcess:
        """Return the process that trains on a problem."""
        if problem.prior.cross_entropy_gradient(torch.ones(1), torch.ones(1)) is None:
            raise ValueError(
                f"prior={problem.prior}: VI needs a closed-form KL; use Gaussian, Laplace or Flat, "
                f"or method BBP, which samples it"
            )
        return VIProcess(self, problem)


def _output_layer(model: nn.Module) -> str | None:
    """Return the path of a Gaussian linear layer that ends a Sequential, or None."""
    path, module = "", model
    while isinstance(module, nn.Sequential) and len(module):
        name = list(module._modules)[-1]
        path, module = f"{path}.{name}".strip("."), module._modules[name]  # type: ignore[assignment]
    return path if path and isinstance(module, GaussianLinear) else None


class VIProcess(DrawnWeights):
    """Equations of `VI`."""

    settings: VI

    def __init__(self, settings: VI, problem: Problem) -> None:
        likelihood: Likelihood = problem.likelihood
        path = _output_layer(problem.model)
        fixed = type(likelihood) is Gaussian and likelihood.noise_std is not None
        if settings.integrate and fixed and path is not None:
            model = copy.deepcopy(problem.model)
            parent, _, name = path.rpartition(".")
            layer = model.get_submodule(path)
            assert isinstance(layer, GaussianLinear)
            setattr(model.get_submodule(parent), name, IntegratedLinear(layer))
            problem = dataclasses.replace(problem, model=model)
            assert isinstance(likelihood, Gaussian)
            likelihood = ExpectedGaussian(likelihood)
        attached = problem.attach(likelihood, space="parameters", draws=settings.draws)
        super().__init__(settings, problem, attached)

    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return release / b + beta grad KL / n."""
        problem, beta = self.problem, self.settings.beta
        kl = kl_gradient(self.model, problem.prior)
        return {
            name: release[name] / problem.batch_size + beta / problem.n * kl[name]
            for name in state.parameters
        }

    def posterior(self, state: DescentState, **record: Any) -> Posterior:
        """Return the mean-field Gaussian."""
        return MeanFieldPosterior.of(self.final(state), self.problem.likelihood, **record)
