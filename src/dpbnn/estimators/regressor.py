"""PrivateBayesRegressor: the scikit-learn estimator for a number or a count."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import column_or_1d

from dpbnn.calibration.conformal import reach
from dpbnn.data.schema import Schema
from dpbnn.estimators import frames, kinds
from dpbnn.estimators.estimator import PrivateBayes
from dpbnn.estimators.fitting import Target
from dpbnn.estimators.scaling import Scaling, as_array, in_a_line, parsed_bounds
from dpbnn.likelihoods import Gaussian, Likelihood, Poisson
from dpbnn.predictive import CountPredictive, Predictive, RealPredictive
from dpbnn.predictive.base import NumberPredictive

__all__ = ["PrivateBayesRegressor"]


class PrivateBayesRegressor(RegressorMixin, PrivateBayes):
    """A Bayesian network for a number or a count, trained under differential privacy.

    Targets are clipped to their bounds, scaled to [-1, 1], and standardised with the inputs; the
    noise of the observations is learned. Predictions are in the original units, and within the
    bounds of the target.

    Args:
        method: as in `PrivateBayesClassifier`, like all that is not named here.
        epsilon: the budget of one fit; None trains WITHOUT privacy, and both kinds of bounds may
            then be left out.
        target_bounds: (low, high), public range of the target.
        likelihood: "gaussian", or "poisson" for counts: whole numbers from 0, whose variance
            rises with their mean. Counts above the bounds are clipped to them, other numbers
            are bad rows. None takes what the schema says (kind = "count"), or "gaussian".
        schema: a `dpbnn.data.Schema`, or the path of one, in place of both kinds of bounds, as in
            the classifier.
        noise_std: of the observations, in the target's units; None learns it; not for counts.
        hidden: widths of the hidden layers. "auto" is one of 32 units; with the method "auto" two,
            where budget and rows will do for them, which public numbers tell.
        conformal: share of misses, such as 0.1, allowed to prediction intervals; they cost a fifth
            of epsilon and use a fifth of the rows, held out of the training.

    Attributes:
        target_bounds_: (low, high) of the target; the others are those of the classifier.
    """

    _regression = True
    _stated = "target_bounds"

    def __init__(
        self,
        method: Any = "auto",
        *,
        epsilon: float | None = 1.0,
        delta: float | None = None,
        bounds: Any = None,
        target_bounds: Any = None,
        likelihood: str | None = None,
        schema: Any = None,
        noise_std: float | None = None,
        features: str | None = None,
        hidden: Any = "auto",
        prior: Any = None,
        batch_size: float | None = None,
        epochs: float | None = None,
        clip: float | None = None,
        learning_rate: float | None = None,
        samples: int = 100,
        recalibrate: float | str | None = "training",
        conformal: float | None = None,
        ledger: Any = None,
        tuning_runs: int | None = None,
        on_bad_rows: str = "error",
        random_state: Any = None,
        device: str | None = None,
        progress: bool = False,
    ) -> None:
        self._store(locals())

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the predictive mean of every row; of counts too, which need not be whole.

        Args:
            X: inputs [rows, columns].
            return_std: return also the predictive standard deviation.
        """
        predictive = self.predictive(X)
        mean = predictive.mean.cpu().numpy()
        return (mean, predictive.std.cpu().numpy()) if return_std else mean

    def predict_interval(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of an interval for every row.

        With `conformal=alpha` it holds the target, clipped to its bounds, with probability at least
        1 - alpha - 0.01, for rows exchangeable with those of the training.

        Args:
            X: inputs [rows, columns].
        """
        self._covering()
        return self.covering(self.predictive(X))

    def covering(self, predictive: Predictive) -> tuple[np.ndarray, np.ndarray]:
        """Return the intervals for given predictions; see `predict_interval`."""
        threshold = self._covering()
        assert isinstance(predictive.plain, NumberPredictive)
        # The promise is for intervals around the mean as it was calibrated: of counts, clipped to
        # the likelihood's range, and before any other clipping.
        mean = predictive.plain.means.mean(0).double()
        room = reach(threshold, predictive.std.double())
        counts = isinstance(predictive, CountPredictive)
        if counts:
            mean = mean.clamp(0.0, self.target_bounds_[1])
        ends = (mean - room).cpu().numpy(), (mean + room).cpu().numpy()
        if counts:
            ends = np.floor(ends[0]), np.ceil(ends[1])
        if predictive.bounds is None:
            return ends
        return np.clip(ends[0], *predictive.bounds), np.clip(ends[1], *predictive.bounds)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return R^2 on test data, as scikit-learn does; errors quote no target.

        Args:
            X: test inputs.
            y: test targets; with a schema they may be a column of X, and are clipped to its bounds.
            sample_weight: of the rows.
        """
        predicted = self.predict(X)
        if self.schema_ is not None:
            y = self._truth(X, y)
        with in_a_line("correct them", None, y):
            return float(r2_score(y, predicted, sample_weight=sample_weight))

    def _truth(self, X: Any, y: Any) -> np.ndarray:
        """Return targets in their own units, clipped to the bounds of a schema."""
        if self.schema_ is not None:
            return self.schema_.decode_target(frames.encoded(self.schema_, X, y, "error")[1])
        return column_or_1d(as_array(y), warn=True)

    def _target(self, y: np.ndarray) -> Target:
        if self.target_bounds is not None:
            scaling = parsed_bounds(self.target_bounds, None, argument="target_bounds")
        elif self.epsilon is None:
            scaling = Scaling.learned(y)
        else:
            raise ValueError(
                "target_bounds: missing, and reading them off the data would not be private; pass "
                "target_bounds=(low, high) from public knowledge"
            )
        self.target_bounds_ = (float(scaling.low), float(scaling.high))
        self.target_standardisation_ = (0.0, 1.0)
        if kinds.likelihood_of(self) == "poisson":
            if self.target_bounds is None:
                self.target_bounds_ = (0.0, max(1.0, math.ceil(self.target_bounds_[1])))
            return self._counted(y.astype(np.float64))
        return self._scaled_target(scaling(y.astype(np.float64)), float(scaling.half))

    def _declared_target(self, y: np.ndarray, schema: Schema) -> Target:
        assert schema.target.bounds is not None
        self.target_bounds_ = schema.target.bounds
        self.target_standardisation_ = (0.0, 1.0)
        if schema.target.kind == "count":
            return self._counted(y.astype(np.float64))
        return self._scaled_target(y.astype(np.float64), schema.target.scale[1])

    def _counted(self, y: np.ndarray) -> Target:
        if self.noise_std is not None:
            raise ValueError(
                f"noise_std={self.noise_std}: counts have none, their mean says how much they "
                f"vary; leave it out"
            )
        counts = kinds.Counts(self.target_bounds_)
        known = counts.clipped(y, self.on_bad_rows)[:, None]
        return Target(known.astype(np.float32), 1, counts.likelihood, counts.rooted(known))

    def _scaled_target(self, y: np.ndarray, half: float) -> Target:
        noise = None if self.noise_std is None else self.noise_std / half
        return Target(y[:, None], 1, Gaussian(noise), y[:, None])

    def _in_order(self, predictive: Predictive) -> Predictive:
        return predictive

    def _original(self, predictive: Predictive) -> Predictive:
        """Return N(half m + middle, half^2 v) for every component N(m, v); counts as they are."""
        low, high = self.target_bounds_
        if isinstance(predictive, CountPredictive):
            return CountPredictive(predictive.log_rates, (low, high))
        assert isinstance(predictive, RealPredictive)
        scaling = Scaling(np.float64(low), np.float64(high))
        centre, spread = self.target_standardisation_
        half = float(scaling.half) * spread
        middle = float(scaling.middle) + float(scaling.half) * centre
        bounded = self.target_bounds is not None or self.schema_ is not None
        return predictive.moved(half, middle, (low, high) if bounded else None)

    def _shifted(
        self, target: Target, centre: np.ndarray, spread: np.ndarray, noise: Likelihood
    ) -> Target:
        self.target_standardisation_ = (float(centre[0]), float(spread[0]))
        likelihood: Any = target.likelihood
        if isinstance(likelihood, Poisson):
            found = kinds.Counts(self.target_bounds_).learned(
                *self.target_standardisation_, scaled=self.method == "auto"
            )
            return dataclasses.replace(target, likelihood=found)
        if likelihood.noise_std is not None:
            likelihood = Gaussian(likelihood.noise_std / float(spread[0]))
        elif self.method == "auto":
            likelihood = noise
        return Target((target.values - centre) / spread, 1, likelihood, target.beside)
