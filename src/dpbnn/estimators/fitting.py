"""A fit of an estimator: plans, scaling, training, calibration, and how it goes on.

Every release is planned before the first one is made. In a run folder, what was released is kept,
so that a fit that was interrupted goes on with it. No step here may repeat a release for free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from sklearn.utils import check_random_state

from dpbnn import training
from dpbnn.data.paid import LABEL
from dpbnn.data.standardising import Standardisation
from dpbnn.data.statistics import private_bounds
from dpbnn.estimators import budget, kinds, recipes
from dpbnn.estimators.held_out import HeldOut, Parts
from dpbnn.estimators.open_prior import chosen_prior
from dpbnn.estimators.persons import UNIT, Persons
from dpbnn.estimators.public_inputs import with_bands
from dpbnn.estimators.scaling import Scaling, parsed_bounds
from dpbnn.estimators.workspace import Workspace, new_run
from dpbnn.posteriors import Posterior
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy.checks import round_up
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.statement import PrivacyStatement
from dpbnn.progress import unbroken

if TYPE_CHECKING:
    from dpbnn.estimators.estimator import PrivateBayes

__all__ = ["Target", "planned", "train"]

SHARE = 0.1  # of epsilon, for bounds="private"
_SHORT = 1_000_000  # rows seen by a training that ends so soon that four checkpoints will do
_OPEN = "trained without privacy, as epsilon=None asks"
Fitted = TypeVar("Fitted", bound="PrivateBayes")


@dataclasses.dataclass(frozen=True)
class Target:
    """Targets as the network sees them.

    Attributes:
        values: class numbers, counts, or scaled numbers.
        outputs: number of outputs of the network.
        likelihood: as in `dpbnn.fit`.
        beside: numbers in [-1, 1] that are standardised with the inputs; None for classes.
    """

    values: np.ndarray
    outputs: int
    likelihood: Any
    beside: np.ndarray | None = None

    @property
    def known(self) -> np.ndarray:
        """Which rows have a target that can be used; the others contribute nothing to anything."""
        return self.values >= 0 if self.beside is None else np.isfinite(self.beside).all(1)


def train(
    estimator: Fitted,
    X: Any,
    y: Any = None,
    *,
    units: Any = None,
    unit: str = UNIT,
    max_records: int | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Fitted:
    """Fit an estimator, as its method `fit` does.

    Args:
        estimator: is given its fitted attributes.
        X: as in `fit` of the estimators.
        y: likewise.
        units: likewise.
        unit: likewise.
        max_records: likewise.
        out: likewise.
        resume: likewise.
        overwrite: likewise.
        settings: further entries for the manifest of the run.
    """
    for name in [name for name in vars(estimator) if name.endswith("_")]:
        delattr(estimator, name)  # a fit that fails leaves nothing, least of all beside an old one
    estimator._check_settings()
    if out is None:
        if resume or overwrite:
            raise ValueError("resume and overwrite: need out=, the folder of the run")
        x, target, _ = estimator._table(X, y)
        persons = Persons.of_fit(estimator, X, len(x), units, unit, max_records)
        _Fit(estimator, x, target, persons, None).run({})
        return estimator
    if isinstance(estimator.ledger, Ledger) and estimator.ledger.path is None:
        raise ValueError(
            "ledger: one in memory goes with this process; with out= give the path of a ledger "
            "file, or leave it out for one in that folder"
        )
    given = getattr(estimator.ledger, "path", estimator.ledger)
    ledger = None if given is None else Path(given)
    with new_run(Path(out), overwrite=overwrite, ledger=ledger, resume=resume) as place:
        x, target, table = estimator._table(X, y)
        persons = Persons.of_fit(estimator, X, len(x), units, unit, max_records)
        place.bind(estimator, table, persons.owners)
        _Fit(estimator, x, target, persons, place).run(settings or {})
    return estimator


def planned(
    estimator: PrivateBayes,
    rows: int,
    columns: int,
    classes: int | None,
    persons: Persons | None = None,
) -> Plan:
    """Return the plan of a fit; see `PrivateBayes.planned`.

    Args:
        estimator: its settings.
        rows: of the table.
        columns: of the inputs, as they are encoded.
        classes: their number; None for a regression.
        persons: whose rows they are, where the unit is not a row.
    """
    persons = persons or Persons()
    recipe = persons.recipe(estimator._recipe(classes or 1)[0], estimator)
    held = estimator._held_out(recipe)
    parts, delta = held.parts(rows), estimator._delta(persons.count or rows)
    later = held.plans(parts, estimator.epsilon, delta)
    shape = (persons.count or len(parts.train), columns)
    plans = _plans(estimator, shape, delta, later, recipe)
    return persons.planned(plans.bounds, plans.standard, plans.training)[2]


@dataclasses.dataclass(frozen=True)
class _Plans:
    """Plans of private bounds, of the standardisation, and of the training with all others."""

    bounds: Plan | None
    standard: Plan | None
    training: Plan


def _plans(
    estimator: PrivateBayes,
    shape: tuple[int, int],
    delta: float,
    later: tuple[Plan | None, ...],
    recipe: recipes.Recipe,
) -> _Plans:
    """Return the plans.

    Args:
        estimator: its settings.
        shape: rows for the training (or their persons), and columns.
        delta: of all together.
        later: plans of what is spent after the training.
        recipe: of the method.
    """
    n, columns = shape
    bounds = standard = None
    if isinstance(estimator.bounds, str) and estimator.epsilon is not None:
        bounds = budget.solved_plan(
            epsilon=SHARE * estimator.epsilon, delta=delta, n=n, sampling="full-batch", steps=1
        )
    if recipe.standardise and estimator.epsilon is not None:
        weights = budget.weights(columns, estimator._regression)
        standard = budget.standardising_plan(n, weights, estimator.epsilon, delta, recipe.noise)
    beside = tuple(plan for plan in (bounds, standard, *later) if plan is not None)
    plan = budget.settled_plan(
        n, estimator.epsilon, delta, estimator.batch_size, estimator.epochs, beside, recipe.steps,
        recipe.every,
    )  # fmt: skip
    return _Plans(bounds, standard, plan)


class _Fit:
    """One fit: what it needs is settled when it is made, before anything is spent.

    Args:
        estimator: is given its fitted attributes.
        x: inputs of all rows.
        target: of all rows.
        persons: whose rows they are.
        place: the run folder, which knows what an interrupted fit has released; None without.
    """

    def __init__(
        self,
        estimator: PrivateBayes,
        x: np.ndarray,
        target: Target,
        persons: Persons,
        place: Workspace | None,
    ) -> None:
        self.estimator, self.all, self.target, self.place = estimator, x, target, place
        self.persons, self.features = persons, estimator._features()
        known, method = estimator._recipe(target.outputs)
        self.recipe = persons.recipe(known, estimator)
        self.held: HeldOut = estimator._held_out(self.recipe)
        self.parts: Parts = self.held.parts(len(x))
        self.rows: Any = self.parts.train if self.held else slice(None)
        self.x = x[self.rows]
        self.delta = estimator._delta(persons.count or len(x))
        self.later = self.held.plans(self.parts, estimator.epsilon, self.delta)
        own = place is not None and place.own
        self.ledger = place.book(self.delta) if own else estimator._ledger(self.delta)  # type: ignore[union-attr]
        self._check_paid_bounds()
        shape = (persons.count or len(self.x), self.x.shape[1])
        plans = _plans(estimator, shape, self.delta, self.later, self.recipe)
        plans = _Plans(*persons.planned(plans.bounds, plans.standard, plans.training))
        self.plans, self.plan = plans, plans.training
        self.method, columns = method, self.x.shape[1]
        self.layers = self.recipe.layers(
            estimator.hidden, columns, self.plan, estimator._regression
        )
        if method is None:
            noise = kinds.steepness(target.likelihood)
            self.method = self.recipe.settings(
                self.plan, noise, estimator._regression, estimator.learning_rate, estimator.clip,
                columns, len(self.layers),
            )  # fmt: skip
        if plans.bounds is not None or self.method is estimator.method:
            self.method.settled(self.plan)  # refuses settings before anything is paid for
        self.recipe.check(self.layers, estimator.prior, self.plan)
        self.released: dict[str, Any] = {}
        if place is not None and place.resumed:
            self.released = place.released(self.ledger)
        elif place is not None:
            place.keep(self.ledger, {})  # names the ledger that another attempt must have
        self.seed = self.released.get(
            "seed", int(check_random_state(estimator.random_state).randint(2**31 - 1))
        )
        bounds = sum(event.count for event in self.ledger.spent(LABEL))  # private: no scores
        self.earlier = self.released.get("earlier", self.ledger.releases - bounds)

    def _check_paid_bounds(self) -> None:
        """Raise where the schema has bounds that the ledger of this fit has not paid for."""
        schema = self.estimator.schema_
        paid = None if schema is None or self.estimator.epsilon is None else schema.private_bounds
        if paid is None:
            return
        if self.persons.owners is not None:
            raise ValueError(
                f"schema: its bounds were learned privately for one row and not for one "
                f"{self.persons.unit}; state public bounds"
            )
        paid.check(self.ledger)

    def run(self, settings: Mapping[str, Any]) -> None:
        """Scale, train and calibrate; in a run folder, write the run.

        Args:
            settings: further entries for the manifest of the run.
        """
        with self._told():
            with unbroken():
                scaling = self._scaling()
                scaling = self._standardised(scaling)
                scaling = dataclasses.replace(scaling, features=self.features)
                self._keep(seed=self.seed, earlier=self.earlier)
            trained = [self._trained(scaling)]
            with unbroken():  # what is released here cannot be used by another attempt
                self._finish(trained.pop(), scaling)  # held by nothing else when its files go
                if self.place is not None:
                    self.place.save(self.estimator, settings)

    def _keep(self, **values: Any) -> None:
        self.released |= values
        if self.place is not None:
            self.place.keep(self.ledger, self.released)

    def _scaling(self) -> Scaling:
        """Return the scaling of the inputs; private bounds are paid for here."""
        estimator = self.estimator
        bounds = (-1.0, 1.0) if estimator.schema_ is not None else estimator.bounds
        if isinstance(bounds, str) and bounds != "private":
            raise ValueError(
                f"bounds={bounds!r}: must be (low, high), a dict by column, or 'private'"
            )
        if bounds is None and estimator.epsilon is not None:
            raise ValueError(
                "bounds: missing, and reading them off the data would not be private; pass "
                "bounds=(low, high) from public knowledge, or bounds='private' to pay for them"
            )
        if self.plan.beside and not self.released:
            self.ledger.check(self.plan.events)
        if self.plans.bounds is not None:
            if "bounds" not in self.released:
                good = self.target.known[self.rows] & np.isfinite(self.x).all(1)
                found = private_bounds(
                    np.where(good[:, None], self.x.astype(np.float64), np.nan),
                    plan=self.plans.bounds, ledger=self.ledger, label="private bounds",
                )  # fmt: skip
                self._keep(bounds=tuple(found))
            return Scaling(*self.released["bounds"])
        if bounds is None or isinstance(bounds, str):
            return Scaling.learned(self.x)
        names = getattr(estimator, "feature_names_in_", None)
        return parsed_bounds(bounds, self.x.shape[1], None if estimator.schema_ else names)

    def _standardised(self, scaling: Scaling) -> Scaling:
        """Return the scaling with its standardisation, which is paid for here."""
        estimator = self.estimator
        estimator.standardisation_ = None
        if not self.recipe.standardise:
            return scaling
        values, count = scaling(self.x, np.float32), self.x.shape[1]
        known = torch.from_numpy(self.target.known[self.rows])
        if self.target.beside is not None:
            values = np.concatenate([values, self.target.beside[self.rows]], 1)
        if "standard" not in self.released:
            weights = budget.weights(count, estimator._regression)
            found = budget.standardisation(
                values, weights, estimator.epsilon, self.plans.standard, self.ledger,
                self.persons.owners, known,
            )  # fmt: skip
            self._keep(standard=(found.centre, found.spread))
        else:
            found = Standardisation(*self.released["standard"])
        inputs = Standardisation(found.centre[:count], found.spread[:count])
        estimator.standardisation_ = (inputs.centre, inputs.spread)
        noise = self.recipe.learned_noise(self.plan)
        self.target = estimator._shifted(
            self.target, found.centre[count:], found.spread[count:], noise
        )
        return dataclasses.replace(scaling, standard=inputs)

    def _trained(self, scaling: Scaling) -> Posterior:
        """Return the posterior, from an earlier attempt where one has ended."""
        estimator, place = self.estimator, self.place
        if place is not None and place.trained.is_dir():
            return training.load(place.trained, device=estimator.device or "cpu")
        inputs = torch.from_numpy(scaling(self.x, np.float32))
        network = self.recipe.network(
            inputs.shape[1], self.layers, self.target.outputs, self.plan, estimator._regression
        )
        data = inputs, torch.from_numpy(self.target.values[self.rows])
        method = with_bands(self.recipe, self.method, scaling, self.target.likelihood, network)
        short = self.plan.steps * self.plan.batch_size < _SHORT
        fit = functools.partial(
            training.fit, network, likelihood=self.target.likelihood, method=method,
            seed=self.seed, device=estimator.device, on_bad_rows=estimator.on_bad_rows,
            progress=estimator.progress, debug_seed=None if self.plan.private else self.seed,
        )  # fmt: skip
        posterior = fit(
            data=data,
            prior=self._prior(fit, data, network),
            plan=self.plan,
            ledger=self.ledger,
            out=None if place is None else place.training,
            resume=place is not None and place.checkpointed,
            checkpoint_every=max(1, self.plan.steps // 4) if short else None,
            tuning_runs=estimator.tuning_runs,
            beside_paid=True,
            **self.persons.arguments(),
        )
        if place is not None:
            with unbroken():
                posterior.save(place.trained)
                self._keep()
        return posterior

    def _prior(self, fit: Any, data: tuple[torch.Tensor, torch.Tensor], network: Any) -> Prior:
        """Return the user's prior, or that of the recipe, which data choose WITHOUT privacy."""
        if self.estimator.prior is not None:
            return self.estimator.prior
        first = self.recipe.prior(self.plan, data[0].shape[1], self.estimator._regression)
        if self.plan.private or not self.recipe.curved or self.persons.owners is not None:
            return first
        if "prior" not in self.released:
            good = torch.from_numpy(self.target.known[self.rows]) & data[0].isfinite().all(1)
            self._keep(prior=chosen_prior(fit, data, good, network, self.plan, first).std)
        return Gaussian(self.released["prior"])

    def _finish(self, posterior: Posterior, scaling: Scaling) -> None:
        """Calibrate, and set the fitted attributes."""
        estimator = self.estimator
        temper, cover = (
            (torch.from_numpy(scaling(self.all[part])), torch.from_numpy(self.target.values[part]))
            for part in (self.parts.temper, self.parts.cover)
        )
        estimator.temperature_, estimator.threshold_, statement = self.held.found(
            estimator._in_double(posterior) if self.held else posterior,
            self.plan, self.later, temper, cover, self.ledger, estimator.samples, self.seed,
        )  # fmt: skip
        posterior.privacy = self._stamped(statement)
        estimator.posterior_ = posterior
        estimator.bounds_ = (scaling.low, scaling.high)
        estimator.ledger_, estimator.plan_, estimator.seed_ = self.ledger, self.plan, self.seed

    def _stamped(self, statement: PrivacyStatement) -> PrivacyStatement:
        """Return the statement, with a caveat where earlier fits may have chosen the settings."""
        if self.estimator.epsilon is None:
            return PrivacyStatement.not_private(_OPEN)
        if not self.earlier or self.estimator.tuning_runs == 0:
            return statement
        caveat = (
            f"the ledger held {self.earlier} release{'s' * (self.earlier != 1)} before this fit; "
            f"if scores of earlier fits chose its settings, that choice is unaccounted for: the "
            f"scores were not private releases (use dpbnn.select)"
        )
        return dataclasses.replace(statement, caveats=(*statement.caveats, caveat))

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Let an interruption say what was spent and how to go on."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit) as stop:
            stop.add_note(self._interrupted())
            raise

    def _interrupted(self) -> str:
        if self.estimator.epsilon is None:
            spent = "the fit is not private"
        elif self.ledger.untouched:
            spent = "nothing was spent"
        else:
            now = self.ledger.statement(delta=self.delta)
            path = self.ledger.path if self.place is None else self.place.ledger
            where = "" if path is None else f", by the ledger {path}"
            spent = f"epsilon {round_up(now.epsilon)} at delta {now.delta:g} is spent{where}"
        if self.place is None:
            return f"Interrupted: {spent}. Without a folder (out='run/') a fit cannot be resumed."
        if self.place.complete:
            return f"Interrupted at the end: {spent}, and {self.place.out} is complete."
        if not self.place.resumable:
            return f"Interrupted: {spent}. There is nothing to resume; begin again."
        return (
            f"Interrupted: {spent}. To go on, fit the same table with the same settings"
            f"{'' if self.place.own else ', this ledger (--ledger)'} and resume=True (--resume) "
            f"into {self.place.out}: what is paid for is not paid again."
        )
