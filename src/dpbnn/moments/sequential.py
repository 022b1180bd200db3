"""One record at a time: the updates that ADF, EP and SEP have in common, on small matrices."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Gamma", "PriorSites", "SequentialNetwork", "Tilted"]

Array = NDArray[np.float64]
_LEAST, _MOST = 1e-20, 1e20  # precisions within which an update is taken
_STEEP = 10.0  # change of log Z beyond which its normal form says nothing of the precision
_RANGE = 1e100  # of a Gamma's parameters, and 1/_RANGE


@dataclasses.dataclass(frozen=True)
class Gamma:
    """A Gamma distribution of a precision; 1/precision has mean b / (a - 1)."""

    a: float = 6.0
    b: float = 6.0

    @property
    def variance(self) -> float:
        """Mean of 1/precision."""
        return self.b / (self.a - 1)

    @property
    def valid(self) -> bool:
        """Whether the mean of 1/precision exists, and can be computed with."""
        return 1 < self.a < _RANGE and 1 / _RANGE < self.b < _RANGE

    def tilted(self, squared: float, v: float) -> Gamma:
        """Return the Gamma matched to N(0; squared residual, v + 1/precision) times this one.

        With Z, Z1, Z2 the normalisers at a, a + 1, a + 2:
            a <- 1 / (Z2 Z / Z1^2 (a + 1)/a - 1),
            b <- 1 / (Z2/Z1 (a + 1)/b - Z1/Z a/b).

        Far from zero the normalisers vanish, and with them what they say; there it is the Gamma
        of the expected squared error e^2 given v and the noise's mean s,
            a <- a + 1/2,   b <- b + E[e^2]/2,   E[e^2] = squared (s/(v + s))^2 + v s/(v + s).
        """
        a, b = self.a, self.b
        log_z = [_log_normal(squared, v + b / (a + i - 1)) for i in range(3)]
        steps = log_z[1] - log_z[0], log_z[2] - log_z[1]
        if not max(map(abs, steps)) < _STEEP:
            share = self.variance / (v + self.variance)
            new = Gamma(a + 0.5, b + 0.5 * share * (squared * share + v))
            return new if new.valid else self
        first, second = map(math.exp, steps)
        by_a, by_b = second / first * (a + 1) / a - 1, (second * (a + 1) - first * a) / b
        if by_a <= 0 or by_b <= 0:
            return self
        new = Gamma(1 / by_a, 1 / by_b)
        return new if new.valid else self


def _log_normal(squared: float, variance: float) -> float:
    return -0.5 * (math.log(2 * math.pi * variance) + squared / variance)


@dataclasses.dataclass(frozen=True)
class Tilted:
    """Derivatives of log Z for one record, and what the noise's update needs.

    Attributes:
        slope: d log Z / dm of all weights, flat; valid until the next record.
        curvature: k = (d log Z / dm)^2 - 2 d log Z / dv, likewise.
        squared: squared residual.
        v: variance of the network's output.
    """

    slope: Array
    curvature: Array
    squared: float
    v: float


class SequentialNetwork:
    """Moments of a ReLU network with one output, for one record; see `NetworkMoments`.

    All weights lie in one flat array, layer after layer, the bias as last column.

    Args:
        shapes: of the layers, [out, in (+ 1)].
        biases: for every layer whether its last column is a bias.
    """

    def __init__(self, shapes: list[tuple[int, int]], biases: list[bool]) -> None:
        self.shapes, self.biases = shapes, biases
        ends = np.cumsum([rows * columns for rows, columns in shapes])
        self.size = int(ends[-1])
        self._slices = [
            slice(int(end) - rows * columns, int(end))
            for end, (rows, columns) in zip(ends, shapes, strict=True)
        ]
        self._slope, self._double = np.zeros(self.size), np.zeros(self.size)
        self._slopes, self._doubles = self.layers(self._slope), self.layers(self._double)
        self._z = [np.ones(columns) for _, columns in shapes]
        self._spread = [np.zeros(columns) for _, columns in shapes]

    def layers(self, flat: Array) -> list[Array]:
        """Return views of a flat array as matrices, one per layer."""
        pairs = zip(self._slices, self.shapes, strict=True)
        return [flat[part].reshape(shape) for part, shape in pairs]

    def tilted(self, mean: Array, variance: Array, x: Array, y: float, noise: float) -> Tilted:
        """Return the derivatives of log N(y; m, v + noise) by every weight's mean and variance."""
        means, variances = self.layers(mean), self.layers(variance)
        last = len(means) - 1
        kept: list[tuple[Array, ...]] = []
        e, e_variance = x, None
        for index, (M, V) in enumerate(zip(means, variances, strict=True)):
            z, spread = self._z[index], self._spread[index]
            width = len(z) - self.biases[index]
            z[:width] = e
            squares = z * z
            m = M.dot(z) / math.sqrt(len(z))
            if e_variance is None:
                v = V.dot(squares)
            else:
                spread[:width] = e_variance
                squares += spread
                v = V.dot(squares) + (M * M).dot(spread)
            v /= len(z)
            if index == last:
                kept.append((z, spread, squares))
                break
            np.maximum(v, 1e-24, out=v)
            rectified = _rectified(m, v)
            kept.append((z, spread, squares, *rectified))
            e, e_variance = rectified[0], rectified[1]
        out = max(float(v[0]), 0.0)
        total = max(out + noise, 1 / _RANGE)
        residual = y - float(m[0])
        g = residual / total
        g_m, g_v = np.array([g]), np.array([0.5 * (g * g - 1 / total)])
        for index in range(last, -1, -1):
            z, spread, squares = kept[index][:3]
            root = 1 / math.sqrt(len(z))
            slope, double = self._slopes[index], self._doubles[index]
            twice = (2 * root * root) * g_v
            np.multiply((root * g_m)[:, None], z, out=slope)
            np.multiply(twice[:, None], squares, out=double)
            if index == 0:
                break
            M, V = means[index], variances[index]
            slope += twice[:, None] * spread * M
            width = len(z) - self.biases[index]
            by_mean = (root * g_m.dot(M) + z * twice.dot(V))[:width]
            by_variance = (0.5 * twice.dot(V + M * M))[:width]
            e, _, upper, lower, density, std = kept[index - 1][3:]
            g_m = by_mean * upper + 2 * by_variance * e * lower
            g_v = by_mean * density / (2 * std) + by_variance * (upper - e * density / std)
        np.subtract(self._slope * self._slope, self._double, out=self._double)
        return Tilted(self._slope, self._double, residual * residual, out)


def _rectified(m: Array, v: Array) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return mean and variance of max(0, N(m, v)), and Phi, 1 - Phi, phi and sqrt(v)."""
    from scipy.special import ndtr

    std = np.sqrt(v)
    r = np.minimum(np.maximum(m / std, -100), 100)
    upper = ndtr(r)
    lower = ndtr(-r)
    density = np.exp(-0.5 * r * r) * (1 / math.sqrt(2 * math.pi))
    e = np.maximum(std * density + m * upper, 0)
    share = upper + r * (r * upper * lower + density * (lower - upper)) - density * density
    return e, v * np.maximum(share, 0), upper, lower, density, std


@dataclasses.dataclass(frozen=True)
class PriorSites:
    """Gaussian priors with one Gamma precision for all weights, refined by EP.

    p(w | l) = N(0, 1/l), l ~ Gamma(a, b). Every weight has a site: a Gaussian and a Gamma factor
    that stand for its p(w | l).

    Attributes:
        gamma: of l.
        first: precision times mean of the sites' Gaussians.
        second: their precisions.
        a: of the sites' Gamma factors.
        b: likewise.
    """

    gamma: Gamma
    first: Array
    second: Array
    a: Array
    b: Array

    @classmethod
    def start(cls, size: int, gamma: Gamma) -> PriorSites:
        """Return the sites of so many weights, at the first Gamma."""
        zeros = (np.zeros(size) for _ in range(3))
        return cls(gamma, next(zeros), np.full(size, 1 / gamma.variance), *zeros)

    def swept(self, first: Array, second: Array) -> PriorSites:
        """Refine every site once, in order, and the natural parameters given, all in place."""
        gamma = self.gamma
        for i in range(len(first)):
            gamma = self._refined(i, gamma, first, second)
        return dataclasses.replace(self, gamma=gamma)

    def _refined(self, i: int, gamma: Gamma, first: Array, second: Array) -> Gamma:
        precision = float(second[i] - self.second[i])
        cavity = Gamma(gamma.a - float(self.a[i]), gamma.b - float(self.b[i]))
        if precision <= 0 or not cavity.valid:
            return gamma
        v = 1 / precision
        m = v * float(first[i] - self.first[i])
        new = cavity.tilted(m * m, v)
        total = v + cavity.variance
        new_v = v - v * v / total
        new_m = m - v * m / total
        if not (new_v * _MOST > 1 and math.isfinite(new_m)):
            return gamma
        self.a[i], self.b[i] = new.a - cavity.a, new.b - cavity.b
        first[i], second[i] = new_m / new_v, 1 / new_v
        self.first[i], self.second[i] = first[i] - m * precision, second[i] - precision
        return new


def usable(precision: Array) -> NDArray[np.bool_] | None:
    """Return where a precision can be taken, or None where all can: an update is undone by weight.

    A precision that is not a number cannot.
    """
    low, high = precision.min(), precision.max()
    if low > _LEAST and high < _MOST:
        return None
    return (precision > _LEAST) & (precision < _MOST)
