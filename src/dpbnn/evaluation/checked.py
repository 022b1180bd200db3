"""Checked inputs of the metrics: probabilities and labels, or predictions and targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpbnn.messages import unquoted
from dpbnn.predictive import (
    ClassPredictive,
    CountPredictive,
    OrdinalPredictive,
    Predictive,
    RealPredictive,
)

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]

_ROWS = 1 << 22  # numbers in a temporary array


def array(values: Any, name: str) -> NDArray[Any]:
    """Return a tensor or array as a NumPy array of numbers."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point() and values.element_size() < 4:
            values = values.float()
        values = values.numpy()
    with unquoted(f"{name} cannot be read as an array", "give numbers", ValueError):
        found = np.asarray(values)
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{name} has dtype {found.dtype}; give numbers")
    return found.astype(np.float32) if found.dtype == np.float16 else found


def finite(values: Any, name: str) -> Floats:
    """Return numbers as float64; NaN, infinity and empty input are refused."""
    found = array(values, name).astype(np.float64)
    if not found.size:
        raise ValueError(f"{name} is empty; give at least one record")
    bad = ~np.isfinite(found)
    if bad.any():
        raise ValueError(
            f"{name} holds {int(bad.sum())} values that are not finite; remove or correct them"
        )
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Classified:
    """Class probabilities [N, K] and labels [N], checked.

    Attributes:
        probabilities: of every class, rows that sum to 1.
        y: labels from 0 to K - 1.
        predictive: the predictive that the probabilities come from, if there is one.
        ordered: whether the classes have an order.
    """

    probabilities: Floats
    y: Integers
    predictive: ClassPredictive | None = None
    ordered: bool = False

    @classmethod
    def of(cls, predictive: Any, y: Any) -> Classified:
        """Check a `ClassPredictive`, or probabilities [N, K], and labels."""
        if isinstance(predictive, Predictive) and not isinstance(predictive, ClassPredictive):
            raise ValueError("a regression prediction was given; this metric needs class labels")
        source = predictive if isinstance(predictive, ClassPredictive) else None
        p = array(predictive.mean if source is not None else predictive, "probabilities")
        if p.ndim != 2:
            raise ValueError(
                f"probabilities have shape {list(p.shape)}; give [records, classes], one row per "
                f"label, or use evaluate_each for several targets"
            )
        if not p.size:
            raise ValueError(f"probabilities have shape {list(p.shape)}; give at least one record")
        if p.dtype.kind != "f":
            p = p.astype(np.float64)
        _check_probabilities(p)
        return cls(p, _labels(y, *p.shape), source, isinstance(source, OrdinalPredictive))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def classes(self) -> int:
        """Number of classes K."""
        return self.probabilities.shape[1]

    @cached_property
    def confidence(self) -> Floats:
        """Largest probability of every record, in float64."""
        return self.probabilities.max(1).astype(np.float64)

    @cached_property
    def hit(self) -> Floats:
        """1 where the most probable class is the label; ties go to the lower class."""
        return (self.probabilities.argmax(1) == self.y).astype(np.float64)

    @cached_property
    def log_prob(self) -> Floats:
        """Log-probability of every label; minus infinity where it is 0."""
        if self.predictive is not None:
            import torch

            return array(self.predictive.log_prob(torch.as_tensor(self.y)), "y").astype(np.float64)
        with np.errstate(divide="ignore"):
            return np.log(self.label_probability)

    @cached_property
    def label_probability(self) -> Floats:
        """Probability of every label, in float64."""
        return self.probabilities[np.arange(len(self)), self.y].astype(np.float64)

    @cached_property
    def squared_norm(self) -> Floats:
        """Sum of squared probabilities of every record, in float64."""
        blocks = _blocks(self.probabilities)
        return np.concatenate([(block.astype(np.float64) ** 2).sum(1) for block in blocks])

    @cached_property
    def entropy(self) -> Floats:
        """Entropy of every record's probabilities, in nats."""
        parts = []
        for block in _blocks(self.probabilities):
            p = block.astype(np.float64)
            parts.append(-(p * np.log(np.where(p > 0, p, 1.0))).sum(1))
        return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Targeted:
    """A prediction of numbers or counts and its targets, checked, in the shape of the mean."""

    predictive: RealPredictive | CountPredictive
    y: Floats

    @classmethod
    def of(cls, predictive: Any, y: Any) -> Targeted:
        """Check a `RealPredictive` or `CountPredictive` and targets [N] or [N, D]."""
        if not isinstance(predictive, RealPredictive | CountPredictive):
            raise ValueError(
                f"{type(predictive).__name__} was given; this metric needs a regression prediction "
                f"(RealPredictive or CountPredictive), as posterior.predict(x) returns with a "
                f"Gaussian or Poisson likelihood"
            )
        shape = tuple(predictive.mean.shape)
        targets = finite(y, "y")
        if targets.shape[:1] != shape[:1] or targets.size != predictive.mean.numel():
            raise ValueError(
                f"y has shape {list(targets.shape)} and the prediction {list(shape)}; give one "
                f"target per prediction"
            )
        return cls(predictive, targets.reshape(shape))

    def __len__(self) -> int:
        return len(self.y)

    def per_record(self, values: Floats) -> Floats:
        """Return the mean over a record's outputs."""
        return values.reshape(len(self), -1).mean(1)


def _blocks(p: Floats) -> Iterator[Floats]:
    size = max(1, _ROWS // p.shape[1])
    return (p[first : first + size] for first in range(0, len(p), size))


def _check_probabilities(p: Floats) -> None:
    for block in _blocks(p):
        if np.isnan(block).any():
            raise ValueError(
                "probabilities of some records are NaN; check the inputs and the weights"
            )
        off = np.abs(block.sum(1, dtype=np.float64) - 1)
        if not (block.min() >= 0 and off.max() <= 1e-3):
            raise ValueError(
                "probabilities of some records are negative or do not sum to 1; give the softmax "
                "of network outputs"
            )


def _labels(y: Any, n: int, classes: int) -> Integers:
    labels = array(y, "y")
    if labels.shape != (n,):
        raise ValueError(
            f"y has shape {list(labels.shape)} for {n} predictions; give one label for each"
        )
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ValueError("y holds NaN or infinity; give labels that are whole numbers")
    whole = labels.astype(np.int64)
    wrong = (whole != labels) | (whole < 0) | (whole >= classes)
    if wrong.any():
        raise ValueError(
            f"y holds {int(wrong.sum())} labels that are none of the classes; labels must be whole "
            f"numbers from 0 to {classes - 1}"
        )
    return whole
