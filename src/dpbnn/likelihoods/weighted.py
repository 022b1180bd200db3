"""Records with weights of their own, such as survey weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpbnn.likelihoods.base import Likelihood, LikelihoodBase
from dpbnn.likelihoods.gaussian import Gaussian
from dpbnn.predictive import Predictive


@dataclass(frozen=True)
class Weighted(LikelihoodBase, name="weighted"):
    """Another likelihood, times a weight that each record brings: w_i log p(y_i | outputs_i).

    The last column of the targets is the weight; the columns before it are the other likelihood's.

    A weight that is a part of its own record costs no privacy: the weighted gradient is clipped
    like any other, so the record moves the sum by the clip at most. Weights that were computed from
    several records (scaled so that they sum to n, balanced by class counts, fitted propensities)
    are NOT covered: leaving one record out would change the contributions of all others.

    Predictions are those of the other likelihood: of the population that the weights stand for.

    Args:
        of: the likelihood underneath.
        most: largest weight, from public knowledge; rows with larger or negative ones are bad rows.
    """

    of: LikelihoodBase = field(default_factory=Gaussian)
    most: float = 100.0

    def __post_init__(self) -> None:
        if not isinstance(self.of, LikelihoodBase) or isinstance(self.of, Weighted):
            raise TypeError(
                "of: must be a likelihood such as dpbnn.likelihoods.Categorical(); pass an object."
            )
        if not 0 < self.most < float("inf"):
            raise ValueError(f"most={self.most} must be a finite number > 0; try most=100.0.")

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return w_i log p(y_i | outputs_i), one number per example."""
        return y[:, -1].to(outputs.dtype) * self.of.log_prob(outputs, self._targets(y, outputs))

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of the likelihood underneath."""
        return self.of.predictive(outputs)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which targets and weights cannot be used."""
        weight = y[:, -1:]
        bad = ~((weight >= 0) & (weight <= self.most))
        return torch.cat([self.of.wrong(y[:, :-1], outputs), bad], 1)

    def expected(self, outputs: Tensor) -> str:
        """Return what targets and weights must be."""
        return f"{self.of.expected(outputs)}, and weights from 0 to most={self.most:g}"

    def columns(self, outputs: int) -> int | None:
        """Return one column more than the likelihood underneath."""
        own = self.of.columns(outputs)
        return 2 if own is None else own + 1

    def with_learned_noise(self) -> Likelihood | None:
        """Return the likelihood of a network that learns its noise, where that underneath does."""
        own = self.of.with_learned_noise()
        return None if own is None else dataclasses.replace(self, of=own)  # type: ignore[arg-type]

    def identified(self, outputs: Tensor) -> Tensor:
        """Return outputs without what does not change the likelihood."""
        return self.of.identified(outputs)

    def _targets(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return the targets without the weight, in the type that the likelihood takes."""
        own = self.of.taken(y[:, :-1], outputs)
        return own[:, 0] if own.shape[1] == 1 else own
