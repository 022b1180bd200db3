"""Predictions whose draws say how far off the function may be, around a mean that is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from dpbnn.predictive.base import Predictive
from dpbnn.predictive.classes import LOWEST, ClassPredictive
from dpbnn.predictive.reals import RealPredictive

__all__ = ["Deviations", "WidenedClassPredictive", "WidenedRealPredictive", "widened"]

_END = 1.645  # normal quantile of the ends of 90 % bands
_ROOM = 2.0  # times the spread at which the low end is lowest, chosen by coverage
_KEPT = 0.002  # by which the draws' mean probability of the top class may be below the prediction's
_HALVINGS = 12
_BLOCK = 2**22  # elements of a temporary
_SHARE = 0.7  # of the variance of a number, which deviations may explain at most


class Deviations:
    """By how much draws of a function differ from its mean, [S, N, ...], of mean 0 over draws.

    Args:
        compute: returns the differences; called when they are first asked for.
    """

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    @cached_property
    def values(self) -> Tensor:
        """The differences, in double precision."""
        found = self._compute().double()
        return found - found.mean(0)

    def then(self, change: Callable[[Tensor], Tensor]) -> Deviations:
        """Return them after a change, which is made when they are asked for."""
        return Deviations(lambda: change(self.values))

    def __reduce__(self) -> Any:
        return _known, (self.values,)


def _known(values: Tensor) -> Deviations:
    found = Deviations(lambda: values)
    vars(found)["values"] = values
    return found


def widened(plain: Predictive, deviations: Deviations) -> Predictive:
    """Return a prediction of classes or numbers with these deviations; another as it is.

    Args:
        plain: the prediction.
        deviations: of logits, or of means in the units of the prediction.
    """
    for kind, wider in _KINDS.items():
        if type(plain) is kind:
            return wider(plain, deviations)
    return plain


class WidenedClassPredictive(ClassPredictive):
    """A prediction of classes, and draws of P(y | x) around it.

        log p_s = log softmax((1 + k) l + d_s)

    l are the logarithms of the mean prediction less their mean, d_s the deviations and k >= 0 the
    smallest number, for every input, at which the draws' mean probability of the most probable
    class is that of the prediction, less 0.002 at most. Without k draws would be less sure on
    average than the prediction, which is calibrated. At inputs of which the prediction is sure, d_s
    of draws that are less sure are made shorter (`_shorter`).

    Mean, mode, entropy, log-probability and sets are those of the prediction itself. Draws,
    quantiles, epistemic and aleatoric uncertainty are those of the draws.

    Args:
        plain: the prediction without deviations.
        deviations: d, of logits.
    """

    def __init__(self, plain: ClassPredictive, deviations: Deviations) -> None:
        self._plain, self.deviations = plain, deviations

    @property
    def plain(self) -> ClassPredictive:
        """The prediction without deviations."""
        return self._plain

    @cached_property
    def log_probabilities(self) -> Tensor:  # type: ignore[override]
        """Log class probabilities of every draw, [S, N, K]."""
        log_mean, away = self._log_mean, self.deviations.values
        logs, moves = log_mean.double().flatten(0, -2), away.flatten(1, -2)
        size = max(1, _BLOCK // moves[:, 0].numel())
        parts = map(_around, logs.split(size), moves.split(size, 1))
        found = torch.cat(list(parts), 1)
        return found.reshape(len(away), *log_mean.shape).to(log_mean.dtype)

    @property
    def _log_mean(self) -> Tensor:  # type: ignore[override]
        return self._plain._log_mean

    @cached_property
    def aleatoric(self) -> Tensor:
        """The rest of the entropy, [N]."""
        return self.entropy - self.epistemic

    @cached_property
    def epistemic(self) -> Tensor:
        """Mutual information of label and draw, at most the entropy, [N]."""
        draws = ClassPredictive(self.log_probabilities)
        return draws.epistemic.minimum(self.entropy)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-probability of labels under the prediction, [N]."""
        return self._plain.log_prob(y)

    def take(self, rows: Any) -> Self:
        """Return the prediction of some inputs, by their positions."""
        moved = self.deviations.then(lambda d: d[:, torch.as_tensor(rows, device=d.device)])
        return type(self)(self._plain.take(rows), moved)

    def target(self, position: int) -> Self:
        """Return the prediction of one of several targets by itself."""
        moved = self.deviations.then(lambda d: d[:, :, position])
        return type(self)(self._plain.target(position), moved)

    def tempered(self, temperature: float) -> Self:
        """Return the prediction at another temperature, by which its logits are divided."""
        moved = self.deviations.then(lambda d: d / temperature)
        return type(self)(self._plain.tempered(temperature), moved)

    def reordered(self, order: Any) -> Self:
        """Return the prediction with its classes in another order, by their positions."""
        moved = self.deviations.then(lambda d: d[..., order])
        return type(self)(self._plain.reordered(order), moved)


class WidenedRealPredictive(RealPredictive):
    """A prediction of numbers, and draws of the mean E(y | x) around its own.

    The variance of the draws is taken from that of the prediction, of which it is 0.7 at most: a
    noise that was learned from residuals has the error of the function in it already. So all
    that is said of y is as without deviations, and only what is said of its mean differs: draws,
    epistemic and aleatoric variance.

    Args:
        plain: the prediction without deviations.
        deviations: of the means.
    """

    def __init__(self, plain: RealPredictive, deviations: Deviations) -> None:
        self._plain, self.deviations, self.bounds = plain, deviations, plain.bounds

    @property
    def plain(self) -> RealPredictive:
        """The prediction without deviations."""
        return self._plain

    @cached_property
    def means(self) -> Tensor:  # type: ignore[override]
        """The mean of every draw, [S, N] or [S, N, D]."""
        away, total = self.deviations.values, self._plain.variance.double()
        share = _SHARE * total / away.var(0, correction=0).clamp(min=1e-300)
        moved = self._plain.means.double().mean(0) + away * share.clamp(max=1.0).sqrt()
        return moved.to(self._plain.means.dtype)

    @cached_property
    def variances(self) -> Tensor:  # type: ignore[override]
        """The noise variance, the same for all draws."""
        return (self._plain.variance - self.epistemic).expand(self.means.shape)

    @property
    def mean(self) -> Tensor:  # type: ignore[override]
        """Predictive mean, inside the bounds."""
        return self._plain.mean

    @property
    def variance(self) -> Tensor:
        """Total variance."""
        return self._plain.variance

    @property
    def mode(self) -> Tensor:  # type: ignore[override]
        """The highest point of each output's density."""
        return self._plain.mode

    @property
    def entropy(self) -> Tensor:  # type: ignore[override]
        """Differential entropy of each output."""
        return self._plain.entropy

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of each output."""
        return self._plain.quantile(q)

    def log_prob(self, y: Tensor) -> Tensor:
        """Return the log-density of targets, [N]."""
        return self._plain.log_prob(y)

    def take(self, rows: Any) -> WidenedRealPredictive:
        """Return the prediction of some inputs, by their positions."""
        moved = self.deviations.then(lambda d: d[:, torch.as_tensor(rows, device=d.device)])
        return WidenedRealPredictive(self._plain.take(rows), moved)

    def target(self, position: int) -> WidenedRealPredictive:
        """Return the prediction of one of several targets by itself."""
        moved = self.deviations.then(lambda d: d[..., position])
        return WidenedRealPredictive(self._plain.target(position), moved)

    def tempered(self, temperature: float) -> WidenedRealPredictive:
        """Return the prediction with a variance T times as large, with the same deviations."""
        return WidenedRealPredictive(self._plain.tempered(temperature), self.deviations)

    def moved(
        self, scale: float, shift: float, bounds: tuple[float, float] | None
    ) -> WidenedRealPredictive:
        """Return the prediction of scale y + shift, with its bounds."""
        moved = self.deviations.then(lambda d: d * scale)
        return WidenedRealPredictive(self._plain.moved(scale, shift, bounds), moved)


_KINDS: dict[type[Predictive], Callable[[Any, Deviations], Predictive]] = {
    ClassPredictive: WidenedClassPredictive,
    RealPredictive: WidenedRealPredictive,
}


def _around(logs: Tensor, away: Tensor) -> Tensor:
    """Return log p_s of `WidenedClassPredictive`, [S, N, K], by bisection for k.

    Args:
        logs: of the mean prediction, [N, K].
        away: deviations of logits, [S, N, K].
    """
    logs = logs.clamp(min=LOWEST)
    away = away - away.mean(-1, keepdim=True)
    centred = logs - logs.mean(-1, keepdim=True)
    top = logs.argmax(-1, keepdim=True)
    away = away * _shorter(logs, away, top)
    wanted = logs.gather(-1, top).exp()[:, 0] - _KEPT
    pair = 2 * away.var(0, correction=0).sum(-1) / (logs.shape[-1] - 1)  # of two logits' difference
    low = torch.zeros_like(wanted)
    high = 2 * ((1 + math.pi / 8 * pair).sqrt() - 1) + 0.1  # twice what a probit would need
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        draws = torch.softmax((1 + middle)[:, None] * centred + away, -1)
        chance = draws.mean(0).gather(-1, top)[:, 0]
        enough = chance >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return ((1 + high)[:, None] * centred + away).log_softmax(-1)


def _shorter(logs: Tensor, away: Tensor, top: Tensor) -> Tensor:
    """Return what draws are multiplied by that are less sure of the top class, and 1, [S, N, 1].

    With log odds l of the top class, and normal deviations of them with standard deviation s, the
    mean is kept where l becomes l sqrt(1 + pi s^2/8). The low end of a band is then that less z s.
    For l above 2.6 it is lowest at s^2 = z^2 / ((pi l/8)^2 - pi z^2/8). Beyond, a few draws are
    sure of another class and all others surer than the prediction, so that a band leaves out what
    is likely. Draws that are less sure get twice that s at most, others what they have.

    Args:
        logs: of the mean prediction, [N, K].
        away: deviations of logits, of mean 0 over classes, [S, N, K].
        top: the most probable class, [N, 1].
    """
    others = logs.scatter(-1, top, -torch.inf)
    beside = others.logsumexp(-1, keepdim=True)
    odds = logs.gather(-1, top) - beside
    moved = away.gather(-1, top.expand(len(away), -1, -1))
    sure = moved - ((others + away).logsumexp(-1, keepdim=True) - beside)
    least = (math.pi / 8 * odds.clamp(min=0.0)).square() - math.pi / 8 * _END**2
    most = _ROOM * _END * least.clamp(min=1e-12).rsqrt()
    spread = sure.std(0, correction=0).clamp(min=1e-12)
    return torch.where(sure < 0, (most / spread).clamp(max=1.0), 1.0)
