"""PrivateBayesClassifier: the scikit-learn estimator for classes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from dpbnn.data.schema import Schema
from dpbnn.data.table import cell, code_of, with_spellings
from dpbnn.estimators import frames, kinds
from dpbnn.estimators.estimator import PrivateBayes
from dpbnn.estimators.fitting import Target
from dpbnn.estimators.scaling import as_array, in_a_line
from dpbnn.likelihoods import Bernoulli, Categorical, Likelihood, Ordinal
from dpbnn.likelihoods.classes import checked_weights
from dpbnn.messages import SHOWN
from dpbnn.predictive import ClassPredictive, Predictive
from dpbnn.privacy.checks import check_positive, quoted

__all__ = ["PrivateBayesClassifier"]

_TRUTHS = {"false": 0, "true": 1}  # booleans are these numbers


class PrivateBayesClassifier(ClassifierMixin, PrivateBayes):
    """A Bayesian network for classes, trained under differential privacy.

    Args:
        method: "auto", which is `dpbnn.estimators.recipes`' choice; "sgld", "sghmc", "sgd", "bbp",
            "vi", "mcdropout", "moments", "noiseaware"; or a method's settings.
        epsilon: the budget of one fit; None trains WITHOUT privacy, and bounds and classes may
            then be left out.
        delta: of the guarantee; by default the ledger's, or min(1e-5, 1/(10 n)).
        bounds: public range of the inputs, which are clipped to it and scaled to [-1, 1]: (low,
            high), with numbers or one value per column; a dict from column name to (low, high); or
            "private", which spends a tenth of the budget on finding them. All methods but "sgld",
            "sghmc" and "sep" then standardise the columns by a private release, so that wide bounds
            do little harm.
        classes: all labels that can occur, from public knowledge.
        schema: a `dpbnn.data.Schema`, or the path of one, in place of bounds and classes. `fit` and
            all methods that predict then take raw data frames, with texts, categories, booleans,
            dates and missing values as the schema declares them; columns are found by name.
        class_weight: public weight of labels, such as {"ill": 5.0}; 1 for those left out. A record
            counts in training by the weight of its label; only ratios matter. Predictions are
            corrected for the weights: they are probabilities in the population, as they are
            without weights. A schema may state them.
        features: "scattering" for square grey images, one a row, pixel by pixel: the model sees
            their scattering maps (`dpbnn.networks.Scattering`), which are fixed and cost no
            privacy; "auto" is then a linear model, and `hidden` is not used.
        likelihood: "categorical"; "ordinal" for classes with an order, which is that of `classes`,
            the lowest first; or "bernoulli" for two classes by one output of the network. None
            takes what the schema says (kind = "ordinal"), or "categorical".
        hidden: widths of the hidden layers.
        prior: of the weights; N(0, 1) by default, and a narrower one for "auto" without privacy.
        batch_size: expected batch size; by default all rows up to 2048 of them, 1024 beyond.
        epochs: passes over the data; by default 800 steps with "auto", 400 with others, and 1000
            without privacy.
        clip: largest norm of one row's gradient; by default solved for ("sgld", "sghmc"), or a
            function of n and the budget.
        learning_rate: of the method; see `dpbnn.estimators.recipes` for the defaults.
        samples: posterior samples in a prediction.
        recalibrate: how a temperature of the predictions is found. "training": on rows of the
            training, for at most a fifth of the budget (of mu^2), and not at all without privacy or
            where noise would decide it. A share of epsilon, such as 0.1: on a fifth of the rows,
            which are held out of the training. None: there is none.
        conformal: share of misses, such as 0.1, allowed to prediction sets; they cost a fifth of
            epsilon and use a fifth of the rows, held out of the training.
        ledger: path of a ledger file, or a `Ledger`, that all fits share; a clone keeps it. A file
            that does not exist yet gets (epsilon, delta) as its budget.
        tuning_runs: how many other runs chose these settings, for the statement; 0 says none did.
        on_bad_rows: "error" refuses rows with missing values or unknown labels and says how many
            there are; "show" does the same and quotes the first of them; "zero" lets them
            contribute nothing.
        random_state: of initialisation and prediction; noise and sampling draw from the operating
            system (without privacy, they follow from it too).
        device: "cpu" or "cuda".
        progress: show a progress bar.

    Attributes:
        classes_: the labels, sorted, or in their own order where they have one; with a schema
            they are numbers or booleans where all its classes are, and texts otherwise.
        feature_names_in_: names of the columns, where they have names.
        privacy_: the `PrivacyStatement`.
        posterior_: the posterior over the weights, for scaled inputs.
        standardisation_: (centre, spread) of every column within [-1, 1]; None without.
        ledger_: what was spent; None for a loaded estimator whose ledger is not there.
        plan_: the plan of the training.
        bounds_: (low, high) of every column.
        diagnostics_: how well the chain has mixed, at public inputs.
        temperature_: of the predictions; None if there is none.
        threshold_: of the sets; None without `conformal`.
    """

    _regression = False
    _stated = "classes"

    def __init__(
        self,
        method: Any = "auto",
        *,
        epsilon: float | None = 1.0,
        delta: float | None = None,
        bounds: Any = None,
        classes: Any = None,
        schema: Any = None,
        class_weight: Any = None,
        features: str | None = None,
        likelihood: str | None = None,
        hidden: Any = (32,),
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

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return class probabilities [rows, classes], averaged over the posterior."""
        mean = self.predictive(X).mean.double().cpu().numpy()
        return mean / mean.sum(1, keepdims=True)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the most probable label of every row.

        Args:
            X: inputs [rows, columns].
            return_std: return also the posterior standard deviation of that label's probability.
        """
        predictive = self.predictive(X)
        chosen = predictive.mode
        labels = self.classes_[chosen.cpu().numpy()]
        if not return_std:
            return labels
        spread = predictive.probabilities.std(0, correction=0)
        return labels, spread.gather(1, chosen[:, None])[:, 0].cpu().numpy()

    def predict_set(self, X: Any) -> np.ndarray:
        """Return for every row the classes that may be true, as booleans [rows, classes].

        With `conformal=alpha` a set holds the truth with probability at least 1 - alpha - 0.01, for
        rows exchangeable with those of the training. A set can be empty,
        where no class is plausible.

        Args:
            X: inputs [rows, columns].
        """
        self._covering()
        return self.covering(self.predictive(X))

    def covering(self, predictive: Predictive) -> np.ndarray:
        """Return the sets for given predictions; see `predict_set`."""
        return (1 - predictive.mean.double() <= self._covering()).cpu().numpy()

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Return the accuracy on test data, as scikit-learn does; errors quote no label.

        Args:
            X: test inputs.
            y: test labels; with a schema they may be a column of X.
            sample_weight: of the rows.
        """
        if self.schema_ is not None:
            right = self.predicted(self.inputs(X)).mode.cpu().numpy() == self._truth(X, y)
            return float(np.average(right, weights=sample_weight))
        predicted = self.predict(X)
        with in_a_line("correct them", None):
            return float(accuracy_score(y, predicted, sample_weight=sample_weight))

    def _truth(self, X: Any, y: Any) -> np.ndarray:
        """Return class numbers in the order of `predicted`."""
        if self.schema_ is not None:
            return frames.encoded(self.schema_, X, y, "error")[1]
        numbers = self.numbers(column_or_1d(as_array(y), warn=True))
        if (numbers < 0).any():
            known = f"={self.classes_.tolist()}" if self.classes is not None else " of the training"
            raise ValueError(f"y: {int((numbers < 0).sum())} labels are none of the classes{known}")
        return numbers

    def _target(self, y: np.ndarray) -> Target:
        if self.classes is None and self.epsilon is not None:
            raise ValueError(
                "classes: missing, and reading them off the data would not be private; pass all "
                "labels that can occur, as in classes=[0, 1]"
            )
        if self.classes is None or self.on_bad_rows != "zero":
            with in_a_line("correct them", None):
                check_classification_targets(y)
        if self.classes is not None and not np.iterable(self.classes):
            raise ValueError(
                f"classes={quoted(self.classes)}: must list all labels that can occur, as in "
                f"classes=[0, 1]"
            )
        self.classes_ = self._sorted(y)
        if len(self.classes_) < 2:
            raise ValueError(
                f"classes: {len(self.classes_)} found, and at least 2 classes are needed; name all "
                f"labels that can occur"
            )
        numbers = self.numbers(y)
        unknown = numbers < 0
        if unknown.any() and self.on_bad_rows != "zero":
            first = np.flatnonzero(unknown)[:SHOWN].tolist()
            rows = ", ".join(f"row {row}: {y[row]!r}" for row in first)
            shown = f" ({rows})" if self.on_bad_rows == "show" else ""
            raise ValueError(
                f"y: {int(unknown.sum())} labels are none of classes={self.classes_.tolist()}"
                f"{shown}; add them to classes, correct them, or pass on_bad_rows='zero'"
            )
        return self._classified(numbers, self.classes_)

    def _sorted(self, y: np.ndarray) -> np.ndarray:
        """Return the labels: sorted, or in the user's order where that is their own."""
        if kinds.likelihood_of(self) != "ordinal":
            return np.unique(y if self.classes is None else np.asarray([*self.classes]))
        if self.classes is None:
            raise ValueError(
                "classes: missing, and the order of the labels is needed; pass all of them, the "
                "lowest first, as in classes=['low', 'middle', 'high']"
            )
        if isinstance(self.classes, Set | Mapping):
            raise ValueError(
                f"classes: a {type(self.classes).__name__} has no order; pass a list, the lowest "
                f"first"
            )
        given = np.asarray([*self.classes])
        if len(np.unique(given)) != len(given):
            raise ValueError("classes: a label is there twice; name each once, the lowest first")
        return given

    def _classified(self, numbers: np.ndarray, labels: np.ndarray) -> Target:
        """Return class numbers with their likelihood."""
        weights, count = self._weights(labels), len(labels)
        name = kinds.likelihood_of(self)
        if name == "categorical":
            return Target(numbers, count, Categorical(weights))
        if name == "ordinal":
            return Target(numbers, count - 1, Ordinal(weights))
        if count != 2:
            raise ValueError(
                f"likelihood='bernoulli': is for two classes, and there are {count}; leave it out"
            )
        return Target(numbers, 1, Bernoulli(weights))

    def _weights(self, classes: np.ndarray) -> tuple[float, ...] | None:
        """Return the weights of classes in their order; None where there are none."""
        given = self.class_weight
        stated = None if self.schema_ is None else self.schema_.target.weights
        if stated is not None:
            if given is not None:
                raise ValueError(
                    "class_weight: the schema states weights; leave one of the two out"
                )
            given = dict(zip(classes.tolist(), stated, strict=True))
        if given is None:
            return None
        if isinstance(given, str):
            raise ValueError(
                f"class_weight={given!r}: weights computed from the labels would depend on all "
                f"records at once, which epsilon does not cover; give public weights, as in "
                f"class_weight={{{classes.tolist()[-1]!r}: 5.0}}, or weights that follow "
                f"from a release of dpbnn.data.private_counts"
            )
        known = classes.tolist()
        if not isinstance(given, Mapping) or not all(label in known for label in given):
            raise ValueError(
                f"class_weight: must map labels among classes={known} to weights, as in "
                f"class_weight={{{known[-1]!r}: 5.0}}"
            )
        recipe = self._recipe(len(known))[0]
        if recipe.method.noise_aware:
            raise ValueError(
                "class_weight: is not for methods that model the noise; pass method='sgd'"
            )
        check_positive(**{f"class_weight[{label!r}]": weight for label, weight in given.items()})
        return recipe.weights(checked_weights(given.get(label, 1.0) for label in known))

    def _declared_target(self, y: np.ndarray, schema: Schema) -> Target:
        labels = frames.labels(schema)
        self.classes_ = labels if schema.target.kind == "ordinal" else np.sort(labels)
        return self._classified(y, labels)

    def _in_order(self, predictive: Predictive) -> Predictive:
        order = self._order()
        if order is None:
            return predictive
        assert isinstance(predictive, ClassPredictive)
        return predictive.reordered(order.tolist())

    def _order(self) -> np.ndarray | None:
        """Return which class of the schema every label of `classes_` is; None where they agree."""
        if self.schema_ is None or self.schema_.target.kind == "ordinal":
            return None
        order = np.argsort(frames.labels(self.schema_))
        return None if (order == np.arange(len(order))).all() else order

    def numbers(self, y: Any) -> np.ndarray:
        """Return the position of every label among the classes, -1 where it is none of them."""
        if self.schema_ is not None:
            found, order = frames.targets(self.schema_, y), self._order()
            return found if order is None else np.append(np.argsort(order), -1)[found]
        labels = np.asarray(y)
        rising = self.classes_.dtype.kind in "iu" and bool((np.diff(self.classes_) > 0).all())
        if labels.dtype.kind in "iu" and rising and labels.size:
            places = np.minimum(np.searchsorted(self.classes_, labels), len(self.classes_) - 1)
            return np.where(self.classes_[places] == labels, places, -1)
        known = {label: number for number, label in enumerate(self.classes_.tolist())}
        truths = {word: known[value] for word, value in _TRUTHS.items() if value in known}
        texts = {str(cell(label)): number for label, number in known.items()}
        texts = {**truths, **with_spellings(texts)}
        found = [_number(known, texts, label) for label in labels.tolist()]
        return np.array(found, dtype=np.int64)

    def _original(self, predictive: Predictive) -> Predictive:
        return predictive

    def _shifted(
        self, target: Target, centre: np.ndarray, spread: np.ndarray, noise: Likelihood
    ) -> Target:
        return target


def _number(known: dict[Any, int], texts: dict[str, int], label: Any) -> int:
    """Return the position of a label, -1 where it is none.

    It counts by its text too: one text among numbers makes pandas read all labels as texts.
    """
    try:
        found = known.get(label)
        return max(code_of(cell(label), texts, frozenset()), -1) if found is None else found
    except TypeError:  # a label that cannot be looked up, such as a list
        return -1
