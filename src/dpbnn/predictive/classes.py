"""Predictive distributions of class labels."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.predictive.base import (
    Predictive,
    check_level,
    check_quantile,
    checked,
    log_mean_exp,
    pick,
)

LOWEST = -1e4  # log-probability that stands for that of probability 0


class ClassPredictive(Predictive):
    """A mixture of categorical distributions.

    entropy(mean) = expected entropy (aleatoric) + mutual information of label and weights
    (epistemic).

    Args:
        log_probabilities: log class probabilities of every posterior sample, [S, N, K]; further
            axes before the classes are positions of one example.
    """

    def __init__(self, log_probabilities: Tensor) -> None:
        self.log_probabilities = checked(log_probabilities, "log_probabilities", 3)
        if self.log_probabilities.numel() and self.log_probabilities.amax() > 1e-3:
            raise ValueError(
                "log_probabilities must be at most 0; pass logits to from_logits and "
                "probabilities to from_probabilities."
            )

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        """Return the predictive of network outputs [S, N, K], log p = f - logsumexp(f)."""
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return cls(logits.log_softmax(-1))

    @classmethod
    def from_probabilities(cls, probabilities: Tensor) -> Self:
        """Return the predictive of class probabilities [S, N, K]."""
        probabilities = checked(probabilities, "probabilities", 3)
        off = (probabilities.sum(-1) - 1).abs().amax().item() if probabilities.numel() else 0.0
        if (probabilities < 0).any() or off > 1e-3:
            raise ValueError(
                "probabilities must be non-negative and sum to 1 over the last axis. For raw "
                "network outputs use from_logits."
            )
        return cls(probabilities.log())

    @property
    def probabilities(self) -> Tensor:
        """Class probabilities of every posterior sample, [S, N, K]."""
        return self.log_probabilities.exp()

    @cached_property
    def _log_mean(self) -> Tensor:
        return log_mean_exp(self.log_probabilities)

    @cached_property
    def mean(self) -> Tensor:
        """Class probabilities p = 1/S sum_s p_s, [N, K]."""
        return self._log_mean.exp()

    @property
    def mode(self) -> Tensor:
        """The class of highest mean probability, [N]."""
        return self._log_mean.argmax(-1)

    @property
    def variance(self) -> Tensor:
        """Variance of the one-hot label, p (1 - p) = Var_s[p_s] + mean_s[p_s (1 - p_s)], [N, K].

        The first part alone is `probabilities.var(0, correction=0)`.
        """
        return self.mean * (1 - self.mean)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities, -sum_k p_k log p_k, [N]."""
        return torch.special.entr(self.mean).sum(-1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Expected entropy, 1/S sum_s entropy(p_s), [N]."""
        total = torch.zeros_like(self.entropy)
        for log_p in self.log_probabilities:
            total += torch.special.entr(log_p.exp()).sum(-1)
        return total / len(self.log_probabilities)

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, entropy - expected entropy, [N]."""
        return (self.entropy - self.aleatoric).clamp(min=0)

    def interval(self, level: float = 0.9) -> Tensor:
        """Return the smallest set of classes of probability >= level, as a mask [N, K].

        Classes join in order of mean probability; ties join the one of lower index first.
        """
        check_level(level)
        ordered, classes = self.mean.sort(dim=-1, descending=True, stable=True)
        needed = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0)) < level
        return torch.zeros_like(needed).scatter(-1, classes, needed)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile over posterior samples of every class's probability, [N, K]."""
        check_quantile(q)
        last = len(self.log_probabilities) - 1
        ordered = self.probabilities.sort(0).values
        lower = min(math.floor(q * last), max(last - 1, 0))
        return torch.lerp(ordered[lower], ordered[min(lower + 1, last)], q * last - lower)

    def samples(self, k: int, generator: torch.Generator | None = None) -> Tensor:
        """Return k draws of the label of every input, [k, N]."""
        picked = pick(len(self.log_probabilities), k, generator, self.mean.device)
        drawn = [
            torch.multinomial(
                self.log_probabilities[s].exp().flatten(0, -2), 1, generator=generator
            )
            for s in picked
        ]
        return torch.stack(drawn).reshape(k, *self.mean.shape[:-1])

    def log_prob(self, y: Tensor) -> Tensor:
        """Return log 1/S sum_s p_s(y_i), [N]; labels of one example are joint."""
        shape, classes = self.mean.shape[:-1], self.mean.shape[-1]
        y = torch.as_tensor(y, device=self.mean.device)
        if y.shape != shape or y.is_floating_point() or y.is_complex():
            raise ValueError(
                f"y has shape {list(y.shape)} and dtype {y.dtype}; labels must be integers of "
                f"shape {list(shape)}."
            )
        y = y.long()
        if y.numel() and not (y.min() >= 0 and y.max() < classes):
            wrong = int(((y < 0) | (y >= classes)).sum())
            raise ValueError(
                f"{wrong} labels are none of the {classes} classes; labels must be in "
                f"0..{classes - 1}."
            )
        index = y.unsqueeze(-1).expand(len(self.log_probabilities), *shape, 1)
        found = self.log_probabilities.gather(-1, index).squeeze(-1)
        return log_mean_exp(found.flatten(2).sum(2) if found.dim() > 2 else found)

    def take(self, rows: Any) -> Self:
        """Return the prediction of some inputs, by their positions."""
        index = torch.as_tensor(rows, device=self.log_probabilities.device)
        return type(self)(self.log_probabilities[:, index])

    def tempered(self, temperature: float) -> Self:
        """Return the prediction with log p_s <- log softmax(log p_s / T) for every sample."""
        scaled = self.log_probabilities.clamp(min=LOWEST) / temperature
        return self.from_logits(scaled)

    def reordered(self, order: Any) -> Self:
        """Return the prediction with its classes in another order, by their positions."""
        return type(self)(self.log_probabilities[..., order])

    def target(self, position: int) -> Self:
        """Return the prediction of one of several targets by itself."""
        return type(self)(self.log_probabilities[:, :, position])


class OrdinalPredictive(ClassPredictive):
    """A mixture of distributions over classes that have an order, such as grades.

    All that `ClassPredictive` has, and what the order gives: cumulative probabilities, a median,
    and intervals without gaps.
    """

    @cached_property
    def cumulative(self) -> Tensor:
        """P(class <= k), [N, K]; the last is 1."""
        found = self.mean.cumsum(-1).clamp(max=1.0)
        return torch.cat([found[..., :-1], torch.ones_like(found[..., -1:])], -1)

    @property
    def expected(self) -> Tensor:
        """Mean number of the class, sum_k k p_k, [N]."""
        numbers = torch.arange(self.mean.shape[-1], device=self.mean.device)
        return (self.mean * numbers).sum(-1)

    @property
    def median(self) -> Tensor:
        """The smallest class with P(class <= k) >= 1/2, [N]."""
        return self.class_quantile(0.5)

    def class_quantile(self, q: float) -> Tensor:
        """Return the smallest class k with P(class <= k) >= q, [N]."""
        check_quantile(q)
        return (self.cumulative < q).sum(-1)

    def interval(self, level: float = 0.9) -> Tensor:
        """Return the classes of the equal-tailed interval, as a mask [N, K] without gaps.

        Its probability is at least `level`: either tail has (1 - level)/2 at most.
        """
        check_level(level)
        tail = (1 - level) / 2
        numbers = torch.arange(self.mean.shape[-1], device=self.mean.device)
        low, high = self.class_quantile(tail), self.class_quantile(1 - tail)
        return (numbers >= low.unsqueeze(-1)) & (numbers <= high.unsqueeze(-1))
