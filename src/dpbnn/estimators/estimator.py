"""What the two estimators share: scikit-learn's contract, predicting, evaluating, saving."""

from __future__ import annotations

import os
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.utils import check_array
from sklearn.utils.validation import check_is_fitted, validate_data

from dpbnn import fit_arguments
from dpbnn.calibration import tempered
from dpbnn.data.schema import Schema
from dpbnn.data.standardising import Standardisation
from dpbnn.estimators import budget, fitting, frames, kinds, pages, recipes, storage
from dpbnn.estimators.fitting import Target
from dpbnn.estimators.held_out import BETA, HeldOut
from dpbnn.estimators.images import Scattered, check_features
from dpbnn.estimators.persons import UNIT
from dpbnn.estimators.scaling import Scaling, as_array, in_a_line, refuse, validated
from dpbnn.estimators.workspace import Fingerprint
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import check_on_bad_rows
from dpbnn.methods.method import Method
from dpbnn.posteriors import Posterior
from dpbnn.predictive import Predictive
from dpbnn.privacy.checks import check_count, check_positive
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement

if TYPE_CHECKING:
    from dpbnn.evaluation import Evaluation

__all__ = ["PrivateBayes"]

_BY_SCHEMA = ("bounds", "classes", "target_bounds")  # what a schema states


class PrivateBayes(BaseEstimator):
    """Base of the estimators; its arguments are documented there."""

    _regression: bool
    schema_: Schema | None = None

    def _store(self, arguments: dict[str, Any]) -> None:
        """Store the arguments of the constructor under their names, and nothing else."""
        vars(self).update((name, value) for name, value in arguments.items() if name != "self")

    @abstractmethod
    def _target(self, y: np.ndarray) -> Target:
        """Return the targets for the network, and set the fitted attributes about them."""

    @abstractmethod
    def _declared_target(self, y: np.ndarray, schema: Schema) -> Target:
        """Do the same with targets that a schema has encoded."""

    @abstractmethod
    def _original(self, predictive: Predictive) -> Predictive:
        """Return a predictive in the units of the targets."""

    @abstractmethod
    def _in_order(self, predictive: Predictive) -> Predictive:
        """Return a predictive whose classes are in the order of `classes_`."""

    @abstractmethod
    def _truth(self, X: Any, y: Any) -> np.ndarray:
        """Return the test targets that `predicted` is compared with."""

    @abstractmethod
    def _shifted(
        self, target: Target, centre: np.ndarray, spread: np.ndarray, noise: Likelihood
    ) -> Target:
        """Return the targets; numbers are standardised, with `noise` where it is learned."""

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        units: Any = None,
        unit: str = UNIT,
        max_records: int | None = None,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        overwrite: bool = False,
        **given: Any,
    ) -> Self:
        """Train on a table of numbers, or, with a schema, on a raw data frame.

        **Guarantee.** The fitted estimator and all its predictions are (epsilon, delta)
        differentially private in the rows; `privacy_` states it, with everything else that the
        ledger holds. Bad data, missing bounds and a spent budget are refused before anything is
        spent. A fit that goes on after an interruption repeats no release without paying for it.

        Args:
            X: inputs [rows, columns]: data frame, array or tensor. With a schema: a pandas or
                polars frame, an Arrow table, a mapping of columns or the path of a file, whose
                columns are found by name.
            y: targets [rows]; with a schema they may be a column of X.
            units: whose row each one is; the guarantee is then for a person with all its rows. A
                schema names a column for it.
            unit: what `units` are called in the statement, such as "patient".
            max_records: public number of rows of a person that count; the rest are bad rows.
            out: folder for a run: its ledger, checkpoints while it trains, and in the end all that
                `dpbnn.load_run` and the command line need.
            resume: go on with an interrupted fit in `out`, with the same settings and table.
            overwrite: replace a run in `out`; what it has spent stays in its ledger.
            **given: refused; for `sample_weight` with the reason.
        """
        refuse(given)
        return fitting.train(
            self, X, y, units=units, unit=unit, max_records=max_records, out=out, resume=resume,
            overwrite=overwrite,
        )  # fmt: skip

    def planned(self, rows: int, columns: int, classes: int | None = None) -> Plan:
        """Return the plan of a fit, with all that is paid beside the training.

        Args:
            rows: of the table.
            columns: of the inputs, as they are encoded.
            classes: their number; None for a regression.
        """
        return fitting.planned(self, rows, columns, classes)

    def predictive(self, X: Any) -> Predictive:
        """Return the predictive distribution at X, in the units of the targets.

        Args:
            X: inputs [rows, columns]; with a schema, a raw data frame.
        """
        return self._in_order(self.predicted(self.inputs(X)))

    def inputs(self, X: Any) -> np.ndarray:
        """Return the inputs of the model: encoded by the schema, or as they are.

        Args:
            X: as in `predictive`.
        """
        check_is_fitted(self)
        if self.schema_ is not None:
            rule = "show" if self.on_bad_rows == "show" else "error"
            return frames.inputs(self.schema_, X, rule)
        names = getattr(self, "feature_names_in_", None)
        if known := frames.is_table(X):
            X = frames.matrix(X, names, self.n_features_in_)
        X = as_array(X)
        with in_a_line("remove or correct those rows", X, show=self.on_bad_rows == "show"):
            if known:
                return check_array(X, dtype=np.float64)
            return validate_data(self, X, reset=False, dtype=np.float64)

    def records(self, X: Any, y: Any, on_bad_rows: str) -> tuple[np.ndarray, np.ndarray]:
        """Return raw records as the schema has them: inputs and targets of `predicted`.

        Args:
            X: a raw data frame.
            y: targets; None takes them from X.
            on_bad_rows: as in `Schema.encode`; "zero" makes the inputs of bad rows NaN.
        """
        assert self.schema_ is not None
        x, found = frames.encoded(self.schema_, X, y, on_bad_rows)
        return x, self.schema_.decode_target(found) if self._regression else found

    def predicted(self, inputs: np.ndarray) -> Predictive:
        """Return the predictive at inputs of `inputs`, with classes in the order of the schema.

        Args:
            inputs: [rows, encoded columns].
        """
        scaling = Scaling(*self.bounds_, self._standard(), features=self._features())
        scaled = torch.from_numpy(scaling(inputs))
        posterior = self._in_double(self.posterior_)
        found = posterior.predict(scaled, self.samples, seed=self.seed_)
        if self.temperature_ is not None:
            found = tempered(found, self.temperature_)
        return self._original(found)

    def evaluate(self, X: Any, y: Any = None, **options: Any) -> Evaluation:
        """Return metrics on test data, with intervals; see `dpbnn.evaluation.evaluate`.

        The numbers are not private in the test data.

        Args:
            X: test inputs.
            y: test targets; with a schema they may be a column of X.
            **options: of `dpbnn.evaluation.evaluate`.
        """
        return pages.evaluated(self, X, y, options)

    def report(
        self,
        path: str | os.PathLike[str],
        X: Any = None,
        y: Any = None,
        *,
        test_data_public: bool = False,
        **options: Any,
    ) -> Path:
        """Write the page of the model: its privacy, and metrics on test data if there are any.

        Args:
            path: of the page, an HTML file that needs no network.
            X: test inputs; None leaves the metrics out.
            y: test targets; with a schema they may be a column of X.
            test_data_public: single test records may be shown.
            **options: of `dpbnn.evaluation.evaluate`.
        """
        check_is_fitted(self)
        return pages.write(self, Path(path), X, y, test_data_public, options)

    @property
    def ordered(self) -> bool:
        """Whether the targets are classes with an order."""
        return kinds.likelihood_of(self) == "ordinal"

    @property
    def privacy_(self) -> PrivacyStatement:
        """The statement of everything in the ledger when training ended."""
        check_is_fitted(self)
        return self.posterior_.privacy

    @property
    def calibration_(self) -> dict[str, float]:
        """The temperature and the threshold with its promise, where there are any."""
        check_is_fitted(self)
        found = {}
        if self.temperature_ is not None:
            found["temperature"] = self.temperature_
        if self.threshold_ is not None:
            found["threshold"] = self.threshold_
            found["coverage at least"] = 1 - self.conformal - BETA
        return found

    @property
    def diagnostics_(self) -> Any:
        """How well a Markov chain has mixed (`dpbnn.evaluation.Diagnostics`); None without one.

        Computed from the network's outputs at 256 inputs drawn uniformly within the bounds, which
        are public; no data is looked at.
        """
        check_is_fitted(self)
        iterates = getattr(self.posterior_, "iterates", None)
        chains = getattr(self.method, "chains", 1)
        chain = recipes.is_chain(self.posterior_.settings["method"])
        if not chain or iterates is None or len(iterates) // chains < 8:
            return None
        from dpbnn.evaluation.diagnostics import diagnose

        drawn = np.random.default_rng(0).uniform(-1, 1, (256, np.size(self.bounds_[0])))
        ends = np.float64(-1), np.float64(1)
        unit = Scaling(*ends, self._standard(), features=self._features())
        return diagnose(self.posterior_, unit(drawn))

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted estimator to a folder: JSON and safetensors, no pickle.

        It is the format of the command line: `dpbnn predict`, `dpbnn evaluate` and `dpbnn report`
        take it, and `dpbnn.load_run` reads it.

        Args:
            folder: where to; its parent must exist. It appears complete or not at all.
            overwrite: replace an estimator that is there already.
        """
        check_is_fitted(self)
        storage.save(self, Path(folder), overwrite)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, device: str = "cpu") -> Self:
        """Return a saved estimator, ready to predict.

        Args:
            folder: written by `save`, by `fit(..., out=folder)` or by `dpbnn fit`.
            device: where predictions are to be computed.
        """
        return storage.load(cls, Path(folder), device)

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags; with a schema, any cell can be an input."""
        tags = super().__sklearn_tags__()
        if self.schema is not None:
            tags.target_tags.required = False
            for kind in ("allow_nan", "string", "categorical"):
                setattr(tags.input_tags, kind, True)
        return tags

    def __sklearn_clone__(self) -> Self:
        """Return an unfitted copy that spends from the same ledger."""
        given = self.get_params(deep=False)
        ledger = given.pop("ledger")
        copied = {name: clone(value, safe=False) for name, value in given.items()}
        return type(self)(**copied, ledger=ledger)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: the posterior as its files, and no ledger in memory."""
        if isinstance(self.ledger, Ledger) and self.ledger.path is None:
            raise TypeError(
                "ledger: one in memory cannot be shared with a copy of the estimator; give the "
                "path of a ledger file, as in ledger='ledger.jsonl'"
            )
        state = dict(super().__getstate__())
        state.pop("_training", None)  # it is for the owner of the table
        if "posterior_" in state:
            state["posterior_"] = storage.packed(state["posterior_"])
            if state["ledger_"] is not None and state["ledger_"].path is None:
                state["ledger_"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a pickle's state."""
        state = dict(state)
        if "posterior_" in state:
            state["posterior_"] = storage.unpacked(state["posterior_"])
        super().__setstate__(state)

    def _table(self, X: Any, y: Any) -> tuple[np.ndarray, Target, tuple[np.ndarray, np.ndarray]]:
        """Return inputs and targets of the training, and both as a fingerprint has them.

        Sets the fitted attributes about the columns, and the fingerprint. Nothing is learned under
        privacy: the columns are those of the schema, or numbers whose bounds are settings.
        """
        schema = frames.schema_of(self.schema, self._regression, self.epsilon is not None)
        if schema is None:
            X, y = validated(self, X, y, self._regression, self.on_bad_rows)
            target = self._target(y)
            table = np.asarray(X, np.float64), y if self._regression else target.values
            self._training = Fingerprint.of(*table)
            return X, target, table
        for name in _BY_SCHEMA:
            if getattr(self, name, None) is not None:
                raise ValueError(f"{name}: the schema states it; leave {name} or the schema out")
        self.schema_ = schema
        self.feature_names_in_ = np.array([c.name for c in schema.columns], dtype=object)
        self.n_features_in_ = len(schema.columns)
        x, found = frames.encoded(schema, X, y, self.on_bad_rows, training=True)
        self._training = Fingerprint.of(x, found)
        return x, self._declared_target(found, schema), (x, found)

    def _known(self, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of other records as a fingerprint has them."""
        if self.schema_ is not None:
            return frames.encoded(self.schema_, X, y, "error")
        truth = self._truth(X, y)
        return self.inputs(X), truth.astype(np.float64) if self._regression else truth

    def _trained_on(self, X: Any, y: Any) -> bool:
        """Return whether records are known to be the very table of the training."""
        known: Fingerprint | None = getattr(self, "_training", None)
        return known is not None and known == Fingerprint.of(*self._known(X, y), known.salt)

    def _recipe(self, outputs: int) -> tuple[recipes.Recipe, Method | None]:
        """Return the recipe of the method, and its settings where the user gave them."""
        if isinstance(self.method, Method):
            known = recipes.METHODS.get(self.method.name)
            recipe = known or recipes.Recipe(type(self.method), None, None)
        elif (
            self.method == "auto"
            and not self.features
            and kinds.likelihood_of(self) in ("gaussian", "categorical")
        ):
            recipe = recipes.of_auto(
                recipes.widths(self.hidden), None if self._regression else outputs
            )
        else:
            recipe = recipes.METHODS[self.method]
        if self.features:
            recipe = recipes.for_features(recipe, self._regression)
        return recipe, self.method if isinstance(self.method, Method) else None

    def _features(self) -> Scattered | None:
        """Return what turns scaled rows into the network's inputs; None leaves them."""
        return Scattered(self.n_features_in_) if self.features else None

    def _held_out(self, recipe: recipes.Recipe) -> HeldOut:
        share = kinds.temperature_of(self, recipe.tempered)
        return HeldOut(share, self.conformal, self._regression, self.on_bad_rows)

    @staticmethod
    def _in_double(posterior: Posterior) -> Posterior:
        """Return the posterior, set so that a row's prediction is the same in any table."""
        if posterior.device.type == "cpu":
            posterior.model.double()
        return posterior

    def _covering(self) -> float:
        """Return the threshold of prediction sets and intervals."""
        check_is_fitted(self)
        if self.threshold_ is None:
            raise ValueError(
                "conformal: the estimator was fitted without it; set it, as in conformal=0.1, and "
                "fit again"
            )
        return self.threshold_

    def _check_settings(self) -> None:
        """Raise for invalid settings, before anything is spent."""
        check_on_bad_rows(self.on_bad_rows)
        recipes.check_method(self.method, self._regression, self.learning_rate, self.clip)
        kinds.likelihood_of(self)
        names = ("epsilon", "delta", "batch_size", "epochs", "clip", "learning_rate")
        check_positive(**{name: getattr(self, name) for name in names})
        check_count(samples=0 if self.samples is None else self.samples)
        check_count(0, tuning_runs=self.tuning_runs)
        book = None if isinstance(self.ledger, str | os.PathLike) else self.ledger
        fit_arguments.check_kinds(prior=self.prior, device=self.device, ledger=book)
        check_features(self.features, self.schema)
        recipes.widths(self.hidden)
        book = None if self.epsilon is None else self._given_ledger()
        if book is not None and not book.relation.public_size:
            raise ValueError(
                f"ledger: its relation is {book.relation}, under which the number of rows is not "
                f"public, and an estimator takes n from it; give a ledger of relation 'zero-out', "
                f"or use dpbnn.fit with plan=dpbnn.plan(n=..., relation='add/remove', ...)"
            )

    def _delta(self, n: int) -> float:
        if self.delta is not None:
            return self.delta
        book = self._given_ledger()
        if book is not None and book.budget is not None:
            return book.budget[1]
        return budget.default_delta(n)

    def _given_ledger(self) -> Ledger | None:
        if self.ledger is None or isinstance(self.ledger, Ledger):
            return self.ledger
        there = Path(self.ledger).exists() and Path(self.ledger).stat().st_size
        return Ledger(self.ledger) if there else None

    def _ledger(self, delta: float) -> Ledger:
        """Return the ledger; a new file gets this estimator's epsilon and delta as its budget."""
        book = self._given_ledger()
        if book is not None:
            return book
        if self.ledger is None:
            return Ledger()
        return Ledger(self.ledger, epsilon=self.epsilon, delta=delta)

    def _standard(self) -> Standardisation | None:
        found = self.standardisation_
        return None if found is None else Standardisation(*found)
