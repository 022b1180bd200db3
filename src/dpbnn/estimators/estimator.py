"""What the two estimators share: validation, scaling, planning, training, predicting."""

from __future__ import annotations

import dataclasses
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from dpbnn import training
from dpbnn.calibration import tempered
from dpbnn.data.standardising import Standardisation
from dpbnn.data.statistics import private_bounds
from dpbnn.estimators import recipes, storage
from dpbnn.estimators.held_out import BETA, TRAINING, HeldOut
from dpbnn.estimators.scaling import Scaling, as_array, in_a_line, parsed_bounds, validated
from dpbnn.messages import check_on_bad_rows
from dpbnn.methods.method import Method
from dpbnn.posteriors import Posterior
from dpbnn.predictive import Predictive
from dpbnn.privacy.checks import check_count, check_positive, quoted
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["PrivateBayes"]

SHARE = 0.1  # of epsilon, for bounds="private"
_OPEN = "trained without privacy, as epsilon=None asks"


@dataclasses.dataclass(frozen=True)
class Target:
    """Targets as the network sees them.

    Attributes:
        values: class numbers, or scaled numbers.
        outputs: number of outputs of the network.
        likelihood: as in `dpbnn.fit`.
    """

    values: np.ndarray
    outputs: int
    likelihood: Any


class PrivateBayes(BaseEstimator):
    """Base of the estimators; its arguments are documented there."""

    _regression: bool

    def _store(self, arguments: dict[str, Any]) -> None:
        """Store the arguments of the constructor under their names, and nothing else."""
        vars(self).update((name, value) for name, value in arguments.items() if name != "self")

    @abstractmethod
    def _target(self, y: np.ndarray) -> Target:
        """Return the targets for the network, and set the fitted attributes about them."""

    @abstractmethod
    def _original(self, predictive: Predictive) -> Predictive:
        """Return a predictive in the units of the targets."""

    @abstractmethod
    def _shifted(
        self, target: Target, centre: np.ndarray, spread: np.ndarray, start: float
    ) -> Target:
        """Return the targets, standardised where they are numbers; noise begins at `start`."""

    def fit(self, X: Any, y: Any) -> Self:
        """Train on a table of numbers.

        **Guarantee.** The fitted estimator and all its predictions are (epsilon, delta)
        differentially private in the rows; `privacy_` states it, with everything else that the
        ledger holds. Bad data, missing bounds and a spent budget are refused before anything is
        spent.

        Args:
            X: inputs [rows, columns]: data frame, array or tensor.
            y: targets [rows].
        """
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)  # a fit that fails leaves nothing, least of all beside an old one
        self._check_settings()
        X, y = validated(self, X, y, self._regression, self.on_bad_rows)
        target = self._target(y)
        recipe, method = self._recipe(target.outputs)
        held = self._held_out(recipe)
        parts = held.parts(len(X))
        rows = parts.train if held else slice(None)
        rest, X = X, X[rows]
        delta = self._delta(len(rest))
        later = held.plans(parts, self.epsilon, delta)
        ledger = self._ledger(delta)
        earlier = ledger.releases
        statistics, standard, plan = self._plans(X.shape, delta, later, recipe)
        if method is None:
            noise = getattr(target.likelihood, "noise_std", None)
            method = recipe.settings(plan, noise, self._regression, self.learning_rate, self.clip)
        if statistics is not None or method is self.method:
            method.settled(plan)  # refuses settings before anything is paid for
        recipe.check(self._widths(), self.prior, plan)
        scaling = self._scaling(X, statistics, plan, ledger)
        self.standardisation_: tuple[np.ndarray, np.ndarray] | None = None
        if recipe.standardise:
            scaling, target = self._standardised(
                scaling, X, target, rows, recipes.noise_start(plan), standard, ledger
            )  # fmt: skip
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        posterior = training.fit(
            recipe.network(X.shape[1], self._widths(), target.outputs, plan, self._regression),
            (torch.from_numpy(scaling(X, np.float32)), torch.from_numpy(target.values[rows])),
            target.likelihood,
            recipe.prior(plan, self._regression) if self.prior is None else self.prior,
            method,
            plan,
            ledger=ledger,
            seed=seed,
            device=self.device,
            on_bad_rows=self.on_bad_rows,
            tuning_runs=self.tuning_runs,
            progress=self.progress,
            debug_seed=None if plan.private else seed,
            beside_paid=True,
        )
        self.temperature_, self.threshold_, statement = held.found(
            self._in_double(posterior) if held else posterior,
            plan,
            later,
            *((torch.from_numpy(scaling(rest[part])), torch.from_numpy(target.values[part]))
              for part in (parts.temper, parts.cover)),
            ledger,
            self.samples,
            seed,
        )  # fmt: skip
        posterior.privacy = self._stamped(statement, earlier)
        self.posterior_ = posterior
        self.bounds_ = (scaling.low, scaling.high)
        self.ledger_, self.plan_, self.seed_ = ledger, plan, seed
        return self

    def planned(self, rows: int, columns: int, classes: int | None = None) -> Plan:
        """Return the plan of a fit, with all that is paid beside the training.

        Args:
            rows: of the table.
            columns: of the inputs.
            classes: their number; None for a regression.
        """
        recipe, _ = self._recipe(classes or 1)
        held = self._held_out(recipe)
        parts, delta = held.parts(rows), self._delta(rows)
        later = held.plans(parts, self.epsilon, delta)
        return self._plans((len(parts.train), columns), delta, later, recipe)[2]

    def predictive(self, X: Any) -> Predictive:
        """Return the predictive distribution at X, in the units of the targets.

        Args:
            X: inputs [rows, columns].
        """
        check_is_fitted(self)
        X = as_array(X)
        with in_a_line("remove or correct those rows", X, show=self.on_bad_rows == "show"):
            X = validate_data(self, X, reset=False, dtype=np.float64)
        inputs = torch.from_numpy(Scaling(*self.bounds_, self._standard())(X))
        posterior = self._in_double(self.posterior_)
        found = posterior.predict(inputs, self.samples, seed=self.seed_)
        if self.temperature_ is not None:
            found = tempered(found, self.temperature_)
        return self._original(found)

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

        drawn = np.random.default_rng(0).uniform(-1, 1, (256, self.n_features_in_))
        unit = Scaling(np.float64(-1), np.float64(1), self._standard())
        return diagnose(self.posterior_, unit(drawn))

    def save(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the fitted estimator to a folder: JSON and safetensors, no pickle.

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
            folder: written by `save`.
            device: where predictions are to be computed.
        """
        return storage.load(cls, Path(folder), device)

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

    def _recipe(self, outputs: int) -> tuple[recipes.Recipe, Method | None]:
        """Return the recipe of the method, and its settings where the user gave them."""
        if isinstance(self.method, Method):
            known = recipes.METHODS.get(self.method.name)
            return known or recipes.Recipe(type(self.method), None, None), self.method
        if self.method == "auto":
            return recipes.of_auto(self._widths(), None if self._regression else outputs), None
        return recipes.METHODS[self.method], None

    def _held_out(self, recipe: recipes.Recipe) -> HeldOut:
        share = self.recalibrate
        if share == TRAINING and not recipe.tempered:
            share = None
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
                "conformal: this estimator was fitted without; pass conformal=0.1, say, and fit "
                "again"
            )
        return self.threshold_

    def _check_settings(self) -> None:
        """Raise for invalid settings, before anything is spent."""
        check_on_bad_rows(self.on_bad_rows)
        recipes.check_method(self.method, self._regression, self.learning_rate, self.clip)
        names = ("epsilon", "delta", "batch_size", "epochs", "clip", "learning_rate")
        check_positive(**{name: getattr(self, name) for name in names})
        check_count(samples=0 if self.samples is None else self.samples)
        check_count(0, tuning_runs=self.tuning_runs)
        training.check_kinds(prior=self.prior, device=self.device)
        self._widths()
        book = None if self.epsilon is None else self._given_ledger()
        if book is not None and not book.relation.public_size:
            raise ValueError(
                f"ledger: its relation is {book.relation}, under which the number of rows is not "
                f"public, and an estimator takes n from it; give a ledger of relation 'zero-out', "
                f"or use dpbnn.fit with plan=dpbnn.plan(n=..., relation='add/remove', ...)"
            )

    def _widths(self) -> tuple[int, ...]:
        try:
            widths = [int(width) for width in np.atleast_1d(self.hidden)]
            whole = widths == list(np.atleast_1d(self.hidden)) and min(widths, default=1) > 0
        except (TypeError, ValueError):
            whole = False
        if not whole:
            raise ValueError(
                f"hidden={quoted(self.hidden)}: must be widths of layers, such as (32,) or ()"
            )
        return tuple(widths)

    def _delta(self, n: int) -> float:
        if self.delta is not None:
            return self.delta
        book = self._given_ledger()
        if book is not None and book.budget is not None:
            return book.budget[1]
        return recipes.default_delta(n)

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

    def _plans(
        self,
        shape: tuple[int, int],
        delta: float,
        later: tuple[Plan | None, ...],
        recipe: recipes.Recipe,
    ) -> tuple[Plan | None, Plan | None, Plan]:
        """Return the plans of private bounds, of the standardisation, and of the training.

        Args:
            shape: rows for the training, and columns.
            delta: of all together.
            later: plans of what is spent after the training.
            recipe: of the method.
        """
        n, columns = shape
        statistics = standard = None
        if isinstance(self.bounds, str) and self.epsilon is not None:
            statistics = recipes.solved_plan(
                epsilon=SHARE * self.epsilon, delta=delta, n=n, sampling="full-batch", steps=1
            )
        if recipe.standardise and self.epsilon is not None:
            weights = recipes.weights(columns, self._regression)
            standard = recipes.standardising_plan(n, weights, self.epsilon, delta, recipe.noise)
        beside = tuple(plan for plan in (statistics, standard, *later) if plan is not None)
        plan = recipes.settled_plan(
            n, self.epsilon, delta, self.batch_size, self.epochs, beside, recipe.steps, recipe.every
        )
        return statistics, standard, plan

    def _scaling(
        self, X: np.ndarray, statistics: Plan | None, plan: Plan, ledger: Ledger
    ) -> Scaling:
        """Return the scaling of the inputs; private bounds are paid for here."""
        if isinstance(self.bounds, str) and self.bounds != "private":
            raise ValueError(
                f"bounds={self.bounds!r}: must be (low, high), a dict by column, or 'private'"
            )
        if self.bounds is None and self.epsilon is not None:
            raise ValueError(
                "bounds: missing, and reading them off the data would not be private; pass "
                "bounds=(low, high) from public knowledge, or bounds='private' to pay for them"
            )
        if plan.beside:
            ledger.check(plan.events)
        if statistics is not None:
            found = private_bounds(
                X.astype(np.float64), plan=statistics, ledger=ledger, label="private bounds"
            )
            return Scaling(*np.array(found).T)
        if self.bounds is None or isinstance(self.bounds, str):
            return Scaling.learned(X)
        return parsed_bounds(self.bounds, X.shape[1], getattr(self, "feature_names_in_", None))

    def _standardised(
        self, scaling: Scaling, X: np.ndarray, target: Target, rows: Any, start: float, *paid: Any
    ) -> tuple[Scaling, Target]:
        """Return scaling and targets, standardised; what is released for it is paid for here.

        Args:
            scaling: to [-1, 1].
            X: inputs of the rows for the training.
            target: of all rows.
            rows: which of them are for the training.
            start: log-variance at which a noise begins.
            *paid: plan and ledger of the releases.
        """
        values, count = scaling(X, np.float32), X.shape[1]
        known = None
        if self._regression:
            values = np.concatenate([values, target.values[rows]], 1)
        else:
            known = torch.from_numpy(target.values[rows] >= 0)
        weights = recipes.weights(count, self._regression)
        found = recipes.standardisation(values, weights, self.epsilon, *paid, known)
        own = Standardisation(found.centre[:count], found.spread[:count])
        self.standardisation_ = (own.centre, own.spread)
        target = self._shifted(target, found.centre[count:], found.spread[count:], start)
        return dataclasses.replace(scaling, standard=own), target

    def _standard(self) -> Standardisation | None:
        found = self.standardisation_
        return None if found is None else Standardisation(*found)

    def _stamped(self, statement: PrivacyStatement, earlier: int) -> PrivacyStatement:
        """Return the statement, with a caveat where earlier fits may have chosen the settings."""
        if self.epsilon is None:
            return PrivacyStatement.not_private(_OPEN)
        if not earlier or self.tuning_runs == 0:
            return statement
        caveat = (
            f"the ledger held {earlier} release{'s' * (earlier != 1)} before this fit; if scores "
            f"of earlier fits chose its settings, that choice is unaccounted for: the scores "
            f"were not private releases (use dpbnn.select)"
        )
        return dataclasses.replace(statement, caveats=(*statement.caveats, caveat))
