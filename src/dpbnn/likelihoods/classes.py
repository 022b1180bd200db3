"""Targets that are classes: unordered, two of them, ordered; and mixtures.

Class weights are public numbers. A record's log-likelihood is multiplied by the weight of its
class, so the network learns weighted probabilities q_k proportional to w_k p_k. Predictions divide
by the weights again: they are probabilities in the population that the records come from.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.likelihoods.base import LikelihoodBase, Outcomes
from dpbnn.predictive import ClassPredictive, OrdinalPredictive, Predictive

_SLOW = 0.3  # share of an output that moves a distance: noise in all of them adds up
_UNKNOWN = 16.0  # variance of a logit of which nothing is known
_WIDER = (2.0, 1.5)  # see `Outcomes`; chosen by coverage
_GAP = 1e-6  # smallest distance of two cut points, so that no class has probability 0


def checked_weights(weights: object) -> tuple[float, ...]:
    """Return class weights as a tuple of positive numbers."""
    if isinstance(weights, str):
        raise ValueError(
            f"weights={weights!r}: weights that are computed from the labels would make every "
            f"record's contribution depend on all others, which epsilon does not cover; give "
            f"public numbers, one for each class, such as weights=(1.0, 9.0)"
        )
    try:
        found = tuple(float(weight) for weight in weights)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = ()
    if not found or not all(0 < weight < math.inf for weight in found):
        raise ValueError("weights: must be one finite number > 0 for each class, as (1.0, 9.0)")
    return found


@dataclass(frozen=True)
class Categorical(LikelihoodBase, name="categorical"):
    """Class labels: log p(y | f) = f_y - logsumexp(f).

    Further axes of the outputs (one label per position, classes last) are summed per example.

    Args:
        weights: public weight of every class, by which its records' log-probabilities are
            multiplied; predictions are corrected for them. None weighs all classes alike.
    """

    weights: tuple[float, ...] | None = None

    never_raises = True

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights))

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return w_y log p(y_i | outputs_i), one number per example."""
        scores = outputs.movedim(-1, 1) if outputs.dim() > 2 else outputs
        nll = F.cross_entropy(scores, y, reduction="none")
        if self.weights is not None:
            self._check(outputs.shape[-1])
            nll = nll * sum((y == k).to(nll.dtype) * w for k, w in enumerate(self.weights))
        return -nll.flatten(1).sum(1) if nll.dim() > 1 else -nll

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of logits [S, N, ..., K], without the weights."""
        if self.weights is not None:
            self._check(outputs.shape[-1])
            outputs = outputs - outputs.new_tensor(self.weights).log()
        return ClassPredictive.from_logits(outputs)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which labels are none of the classes."""
        return _no_class(y, outputs.shape[-1])

    def expected(self, outputs: Tensor) -> str:
        """Return what labels must be."""
        last = outputs.shape[-1] - 1
        return f"labels must be whole numbers from 0 to {last}, the network's outputs"

    def taken(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return whole numbers."""
        return y.long()

    def identified(self, outputs: Tensor) -> Tensor:
        """Return logits of mean 0."""
        return outputs - outputs.mean(-1, keepdim=True)

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return every class with its probability; None for several labels per example."""
        if outputs.dim() != 2:
            return None
        rows, classes = outputs.shape
        weights = outputs.new_tensor(self.weights or [1.0] * classes)
        chances = (outputs - weights.log()).softmax(-1)
        labels = torch.eye(classes).to(outputs)[:, None]
        slopes = weights[:, None, None] * (outputs.softmax(-1) - labels)
        targets = torch.arange(classes, device=outputs.device)[:, None].expand(-1, rows)
        return Outcomes(targets, chances.T, chances - labels, slopes, _UNKNOWN, _WIDER)

    def _check(self, classes: int) -> None:
        if self.weights is not None and len(self.weights) != classes:
            raise ValueError(
                f"weights: {len(self.weights)} for {classes} classes; give one for each."
            )


@dataclass(frozen=True)
class Bernoulli(LikelihoodBase, name="bernoulli"):
    """Targets 0 or 1, one output each: P(y = 1 | f) = sigmoid(f).

    Several outputs are several targets, which are independent given the weights of the network.

    Args:
        weights: public weights (of 0, of 1), by which log-probabilities are multiplied; predictions
            are corrected for them. None weighs both alike.
    """

    weights: tuple[float, ...] | None = None

    never_raises = True

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights))
        if self.weights is not None and len(self.weights) != 2:
            raise ValueError(f"weights: {len(self.weights)}; give two, of 0 and of 1.")

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return sum_k w_y log p(y_ik | outputs_ik), one number per example."""
        y = y.reshape(outputs.shape)
        nll = F.binary_cross_entropy_with_logits(outputs, y, reduction="none")
        if self.weights is not None:
            low, high = self.weights
            nll = nll * (low + (high - low) * y)
        return -nll.flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of logits: of two classes, [N, 2] or [N, D, 2].

        A last axis of 1 is dropped.
        """
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        if self.weights is not None:
            outputs = outputs - math.log(self.weights[1] / self.weights[0])
        if outputs.dim() == 3 and outputs.shape[-1] == 1:
            outputs = outputs[..., 0]
        return ClassPredictive(torch.stack([F.logsigmoid(-outputs), F.logsigmoid(outputs)], -1))

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return 0 and 1 with their probabilities; None for several targets."""
        if outputs.shape[1:] != (1,):
            return None
        low, high = self.weights or (1.0, 1.0)
        targets = outputs.new_tensor([0.0, 1.0])[:, None].expand(-1, len(outputs))
        chance = (outputs[:, 0] - math.log(high / low)).sigmoid()
        weights = outputs.new_tensor([low, high])[:, None]
        return Outcomes(
            targets, torch.stack([1 - chance, chance]), (chance - targets)[..., None],
            (weights * (outputs[:, 0].sigmoid() - targets))[..., None], 2 * _UNKNOWN, _WIDER,
        )  # fmt: skip

    def locations(self, changes: Tensor) -> Tensor:
        """Return changes of the logits of 0, which has none, and of 1."""
        changes = changes[..., 0] if changes.dim() == 3 and changes.shape[-1] == 1 else changes
        return torch.stack([torch.zeros_like(changes), changes], -1)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which targets are neither 0 nor 1."""
        return (y != 0) & (y != 1)

    def expected(self, outputs: Tensor) -> str:
        """Return what targets must be."""
        return "targets must be 0 or 1"

    def columns(self, outputs: int) -> int:
        """Return one column an output."""
        return outputs


@dataclass(frozen=True)
class Ordinal(LikelihoodBase, name="ordinal"):
    """Classes with an order, such as grades, by cumulative probabilities; K - 1 outputs.

        P(y > k | f) = sigmoid(f_0 - c_k),   c_k = c_{k-1} + softplus(0.3 f_k + a_k)

    The first output moves all classes up, the others are distances between cut points, so that
    the probabilities are in order whatever the outputs are. Public constants a_k make all classes
    alike at outputs of 0. The number of classes follows from the network, never from the data.

    Args:
        weights: public weight of every class; see `Categorical`.

    Reference: McCullagh, Regression models for ordinal data, 1980.
    """

    weights: tuple[float, ...] | None = None

    never_raises = True

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights))

    def log_probabilities(self, outputs: Tensor) -> Tensor:
        """Return log P(y = k | outputs) of all classes, [..., K].

        With u_k = f_0 - c_k, sigmoid(u_{k-1}) - sigmoid(u_k) is sigmoid(u_{k-1}) sigmoid(-u_k)
        (1 - exp(u_k - u_{k-1})), which loses no digits.
        """
        first, starts = _even_cuts(outputs.shape[-1] + 1)
        above = outputs[..., 0] - first  # logit of P(y > 0)
        found = [F.logsigmoid(-above)]
        for k, start in enumerate(starts):
            gap = _GAP + F.softplus(_SLOW * outputs[..., k + 1] + start)
            following = above - gap
            inside = torch.log(-torch.expm1(-gap))
            found.append(F.logsigmoid(above) + F.logsigmoid(-following) + inside)
            above = following
        return torch.stack([*found, F.logsigmoid(above)], -1)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return w_y log p(y_i | outputs_i), one number per example."""
        logs = self.log_probabilities(outputs)
        if self.weights is not None:
            self._check(logs.shape[-1])
            logs = torch.stack([logs[..., k] * w for k, w in enumerate(self.weights)], -1)
        return logs.gather(-1, y.reshape(-1, 1)).squeeze(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of raw outputs [S, N, K - 1], without the weights."""
        if outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()
        logs = self.log_probabilities(outputs)
        if self.weights is not None:
            self._check(logs.shape[-1])
            logs = logs - logs.new_tensor(self.weights).log()
        return OrdinalPredictive.from_logits(logs)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which labels are none of the classes."""
        return _no_class(y, outputs.shape[-1] + 1)

    def expected(self, outputs: Tensor) -> str:
        """Return what labels must be."""
        last = outputs.shape[-1]
        return f"labels must be whole numbers from 0 to {last}, the number of the network's outputs"

    def taken(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return whole numbers."""
        return y.long()

    def columns(self, outputs: int) -> int:
        """Return one column: the number of the class."""
        return 1

    def _check(self, classes: int) -> None:
        if self.weights is not None and len(self.weights) != classes:
            raise ValueError(
                f"weights: {len(self.weights)} for {classes} classes; give one for each."
            )


@dataclass(frozen=True)
class Mixture(LikelihoodBase, name="mixture"):
    """Points without targets: outputs are log w_j + log p_j(x), log p(x) = logsumexp of them."""

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(x_i), one number per example; the targets are not used."""
        return outputs.logsumexp(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of the components, of raw outputs [S, N, J]."""
        return ClassPredictive.from_logits(outputs)


def _no_class(y: Tensor, classes: int) -> Tensor:
    """Return which labels are no whole numbers from 0 to classes - 1."""
    wrong = ~((y >= 0) & (y < classes))
    return wrong | (y != y.round()) if y.is_floating_point() else wrong


def _even_cuts(classes: int) -> tuple[float, list[float]]:
    """Return the first cut point of classes that are all alike, and a_k of the others.

    Cut points are logit((k + 1)/K), and a_k is the number whose softplus is their distance.
    """
    cuts = [math.log((k + 1) / (classes - k - 1)) for k in range(classes - 1)]
    gaps = [high - low - _GAP for low, high in itertools.pairwise(cuts)]
    return cuts[0], [math.log(math.expm1(gap)) for gap in gaps]
