"""Default settings: functions of public numbers, the same for every table.

They may not depend on the data that is fitted, except for its numbers of rows and columns, which
are public. benchmarks/tuning.md says on which other tables they were chosen, in how many runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpbnn import methods
from dpbnn.estimators.budget import HIDDEN
from dpbnn.likelihoods import LearnedNoiseGaussian
from dpbnn.methods.method import Method
from dpbnn.methods.sgld import Langevin
from dpbnn.networks import SteepTanh, mlp
from dpbnn.priors import Gaussian
from dpbnn.privacy.checks import quoted
from dpbnn.privacy.plan import Plan

__all__ = ["METHODS", "Recipe"]

_FEW = 400  # rows below which a classifier's steps shrink with n, so that its clip does not
_NOISE = 0.25  # std of scaled targets below which step sizes shrink with it
_KEPT = 100  # stored iterates of a chain, from its second half
_CLIP = (3.0, 0.1)  # smallest clip of standardised columns, and its rise with mu sqrt(n)
_SMALL = 1 / 3  # of it, for the residuals of a regression
_CURVED = {True: 100.0, False: 30.0}  # m of `_told`, at most n, per column from which it has steps
_STEPS = {True: 0.25, False: 1.0}  # their size; both in regression, and for classes
_SMOOTH = 1300.0  # m from which hidden units of a regressor are smooth
_STEEP = (400.0, 2.0)  # m per column from which they, or two layers of them, are steep; the slope
_WIDTH = 32  # of the hidden layers of hidden="auto"
_DEEP = (200.0, 12)  # m per column from which a regressor has two, up to so many columns
_SHORT = 0.5  # what its steps are times, with two
_NARROW = {True: 0.5, False: 0.3}  # std of the prior of few rows, in regression and for classes
_PLENTY = 800  # rows per column from which a regressor without privacy has one of 1
_SCARCE, _SHARP = 100, 0.15  # rows per column below which one with privacy has it, from what m/n
_ENOUGH = 400.0  # m of `_told` below which steps shrink
_LIMIT = 2.0  # largest standardised input of a classifier there; that of all others is 4
_MANY = (12, 100.0)  # columns from which a classifier's steps shrink, and from what m
_TINY = (50.0, 1.0)  # m below which nearly all that a classifier sees is noise, and its clip there


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Defaults of one method.

    Attributes:
        method: the class of its settings.
        rate: learning rate of a classifier; of Langevin methods, times n; None for a method that
            has none.
        regression_rate: likewise of a regressor.
        options: further settings.
        dropout: of the network.
        classifies: whether it has a likelihood for classes.
        standardise: whether columns are standardised by a private release, and the network has a
            linear path and starts at 0; step sizes of the others go with inputs in [-1, 1].
        regresses: whether it has one for numbers.
        steps: of the training under privacy.
        every: whether each step takes all rows, and as few steps do without privacy.
        noise: in a mean, in units of half the bounds, beyond which nothing is standardised.
        curved: whether, where there is enough budget, the linear path has steps of the inputs too
            and a regressor smooth hidden units, or steep ones; and whether a regressor has a
            smaller clip.
        linear: whether it is for a model without hidden layers, with a Gaussian prior.
        flat: whether the network is a linear head, whatever hidden layers are set.
        tempered: whether training rows decide a temperature by default; a posterior that models
            the noise needs none.
        bands: whether the posterior says how far the function may be from the truth.
    """

    method: type[Method]
    rate: float | None
    regression_rate: float | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropout: float = 0.0
    classifies: bool = True
    regresses: bool = True
    standardise: bool = False
    steps: int = 400
    every: bool = False
    noise: float = HIDDEN
    tempered: bool = True
    linear: bool = False
    curved: bool = False
    flat: bool = False
    bands: bool = False

    def check(self, hidden: tuple[int, ...], prior: Any, plan: Plan) -> None:
        """Raise where the method is not for such a network, prior or plan."""
        if self.every and plan.sampling != "full-batch":
            raise ValueError(
                f"batch_size={plan.batch_size:g}: {self.method.__name__} takes all rows in every "
                f"step; leave batch_size out"
            )
        if self.linear and hidden:
            raise ValueError(
                f"hidden={hidden}: {self.method.__name__} is for linear models; pass hidden=()"
            )
        if self.linear and not (prior is None or isinstance(prior, Gaussian)):
            raise ValueError(
                f"prior={prior}: {self.method.__name__} needs a Gaussian one, such as "
                f"dpbnn.Gaussian(1.0)"
            )

    def network(
        self, features: int, hidden: tuple[int, ...], outputs: int, plan: Plan, regression: bool
    ) -> Callable[[], torch.nn.Module]:
        """Return what builds the network."""
        built = functools.partial(_table_network if self.standardise else mlp,
                                  features, () if self.flat else hidden, outputs,
                                  self.dropout)  # fmt: skip
        if not self.curved:
            return built
        told = min(_told(plan), plan.n)
        smooth = regression and told >= _SMOOTH
        steep = len(hidden) > 1 or told >= _STEEP[0] * features
        return functools.partial(
            built,
            limit=_LIMIT if _enough(plan) < 1 and not regression else None,
            activation=torch.nn.Tanh if smooth else torch.nn.ReLU,
            slope=_STEEP[1] if smooth and steep else 1.0,
            steps=_STEPS[regression] if told >= _CURVED[regression] * features else 0.0,
        )

    def layers(self, hidden: Any, columns: int, plan: Plan, regression: bool) -> tuple[int, ...]:
        """Return the widths of the hidden layers: a user's, or two where "auto" can train them."""
        told, (least, most) = min(_told(plan), plan.n), _DEEP
        enough = told >= max(_SMOOTH, least * columns) and columns <= most
        deep = is_auto(hidden) and self.curved and regression and enough
        return widths(hidden) * (2 if deep else 1)

    def prior(self, plan: Plan, columns: int, regression: bool) -> Gaussian:
        """Return the prior of a user who gives none.

        Without privacy nothing but the prior keeps "auto" from learning the noise of few rows. With
        a large budget little else keeps a regressor from it where rows are very few.
        """
        if plan.private:
            sharp = _told(plan) >= _SHARP * plan.n
            narrow = regression and sharp and plan.n < _SCARCE * columns
        else:
            narrow = not (regression and plan.n >= _PLENTY * columns)
        return Gaussian(_NARROW[regression] if self.curved and narrow else 1.0)

    def learned_noise(self, plan: Plan) -> LearnedNoiseGaussian:
        """Return the likelihood of "auto" for numbers, in spreads of the target.

        Its log-variance begins at -2, and nearer to 0 where there is too little budget to learn
        much; elsewhere it may also rise or fall with the mean.
        """
        found = _enough(plan)
        return LearnedNoiseGaussian(
            start=-2.0 * math.sqrt(found), sloped=self.curved and found == 1
        )

    @property
    def langevin(self) -> bool:
        """Whether clip, learning rate and noise are tied to each other."""
        return issubclass(self.method, Langevin)

    def weights(self, given: tuple[float, ...]) -> tuple[float, ...]:
        """Return class weights in the scale that suits the method.

        The largest is 1, so that no gradient becomes longer and the clip does not undo the weights.
        The steps of Langevin methods go with the size of the likelihood: there the geometric mean
        is 1.
        """
        unit = math.exp(sum(map(math.log, given)) / len(given)) if self.langevin else max(given)
        return tuple(weight / unit for weight in given)

    def settings(
        self,
        plan: Plan,
        noise_std: float | None,
        regression: bool,
        learning_rate: float | None,
        clip: float | None,
        columns: int,
        depth: int = 1,
    ) -> Method:
        """Return the method's settings for a plan.

        Args:
            plan: of the training.
            noise_std: of scaled targets, where it is fixed; the smaller, the steeper the posterior
                and the smaller the steps of Langevin methods.
            regression: whether the target is a number.
            learning_rate: the user's, if any.
            clip: the user's, if any.
            columns: number of inputs.
            depth: number of hidden layers.
        """
        options = dict(self.options)
        rate = learning_rate
        if self.rate is None:
            if rate is not None:
                raise ValueError(
                    f"learning_rate={rate}: {self.method.__name__} has none; give its settings, as "
                    f"in method=dpbnn.{self.method.__name__}(...)"
                )
            return self.method(**options, **({} if clip is None else {"clip": clip}))
        if not self.langevin:
            if clip is not None or self.standardise:
                options["clip"] = clip or self._table_clip(plan, regression, columns)
            rate = rate or (self.regression_rate if regression else self.rate)
            if self.standardise and learning_rate is None:
                rate *= self._shrinkage(plan, regression, columns)
                rate *= _SHORT if self.curved and regression and depth > 1 else 1.0
            return self.method(learning_rate=rate, **options)  # type: ignore[call-arg]
        options |= {"keep": _KEPT, "thin": max(1, plan.steps // (2 * _KEPT))}
        if rate is None and clip is not None and plan.private:
            unit = self.method(**options).unit(plan.n, plan.batch_size)  # type: ignore[attr-defined]
            rate = (unit / (clip * plan.noise_multiplier)) ** 2
        elif rate is None:
            rate = self._langevin_rate(plan.n, noise_std, regression)
            clip = None
        return self.method(learning_rate=rate, clip=clip, **options)  # type: ignore[call-arg]

    def _shrinkage(self, plan: Plan, regression: bool, columns: int) -> float:
        """Return the factor of steps that small budgets and many columns make smaller.

        Adam's steps are as long where there is only noise as elsewhere: the noise of the weights
        adds up over columns. With a tiny budget shorter ones would not arrive.
        """
        found = _enough(plan) ** (0.5 if regression else 0.25)
        most, least = _MANY
        many = self.curved and not regression and _told(plan) >= least
        return min(found, math.sqrt(most / columns)) if many else found

    def _table_clip(self, plan: Plan, regression: bool, columns: int) -> float:
        """Return the clip for standardised columns: it rises with the budget, to bias less.

        Where nearly all is noise a classifier on few columns has a small one: all records then have
        one length, which has the least noise. On many columns they are longer than the usual clip.
        """
        told = _told(plan)
        if self.curved and not regression and told < _TINY[0] and columns <= _MANY[0]:
            return _TINY[1]
        risen = _CLIP[1] * told / math.sqrt(plan.n) if plan.private else 0.0
        return max(_CLIP[0], risen) * (_SMALL if self.curved and regression else 1.0)

    def _langevin_rate(self, n: int, noise_std: float | None, regression: bool) -> float:
        if not regression:
            return self.rate * min(1.0, n / _FEW) / n
        factor = 1.0 if noise_std is None else min(1.0, (noise_std / _NOISE) ** 2)
        return self.regression_rate * factor / n


def _told(plan: Plan) -> float:
    """Return m = b sqrt(T) / sigma, where a run's mean gradient has noise clip/m.

    It is n mu where all rows are in every step.
    """
    if not plan.private:
        return math.inf
    return plan.batch_size * math.sqrt(plan.steps) / plan.noise_multiplier


def _enough(plan: Plan) -> float:
    """Return 1 where the budget will do for full steps, and less below."""
    return min(1.0, _told(plan) / _ENOUGH)


_ADAM = {"optimizer": "adam", "average": "polyak", "clip": 3.0}
_PATH = {"optimizer": "adam", "schedule": "linear", "keep": 25}

METHODS: dict[str, Recipe] = {
    "auto": Recipe(
        methods.SGD, 0.02, 0.025, _PATH, standardise=True, steps=800, curved=True, bands=True
    ),
    "sgld": Recipe(methods.SGLD, 0.25, 0.05),
    "sghmc": Recipe(methods.SGHMC, 0.0125, 0.0025),
    "sgd": Recipe(methods.SGD, 0.02, 0.02, _ADAM, standardise=True),
    "bbp": Recipe(methods.BBP, 0.02, 0.02, _ADAM, standardise=True),
    "vi": Recipe(methods.VI, 0.02, 0.02, _ADAM, standardise=True),
    "mcdropout": Recipe(methods.MCDropout, 0.02, 0.02, _ADAM, dropout=0.1, standardise=True),
    "moments": Recipe(
        methods.Moments,
        None,
        None,
        standardise=True,
        steps=3,
        every=True,
        tempered=False,
        linear=True,
        noise=0.03,  # the prior is in units of what is released, so that they must be right
    ),
    "noiseaware": Recipe(methods.NoiseAware, None, None, regresses=False, tempered=False, steps=40),
    "sep": Recipe(methods.SEP, None, None, classifies=False),
}
_HEADS = {
    False: Recipe(
        methods.SGD, 1.0, 1.0, {"momentum": 0.9, "clip": 0.1, "average": "polyak"}, steps=1200,
        flat=True,
    ),
    True: Recipe(methods.SGD, 0.003, 0.003, _ADAM, flat=True),
}  # fmt: skip
"""Linear models of fixed features: of classes, as `dpbnn reproduce records` has it for MNIST, and
of numbers, whose rate was chosen from four on a split of scikit-learn's digits."""


def _table_network(
    features: int,
    hidden: tuple[int, ...],
    outputs: int,
    dropout: float,
    limit: float | None = None,
    slope: float = 1.0,
    **more: Any,
) -> torch.nn.Module:
    """Return a network with a linear path beside its hidden layers, which starts at 0.

    A budget too small to learn anything leaves it near 0, which predicts the base rate. Inputs are
    cut off at `limit`: where noise hides curves, a line through long tails is too sure of them.
    With a `slope` hidden units are `SteepTanh`, whose weights start smaller by it.
    """
    if slope != 1.0:
        more["activation"] = functools.partial(SteepTanh, slope)
    network = mlp(features, hidden, outputs, dropout, linear_path=True, **more)
    with torch.no_grad():
        for parameter in network[:-1].parameters():
            parameter /= slope
    for parameter in network[-1].parameters():
        torch.nn.init.zeros_(parameter)
    return (
        network
        if limit is None
        else torch.nn.Sequential(torch.nn.Hardtanh(-limit, limit), *network)
    )


def check_method(
    method: Any, regression: bool, learning_rate: float | None, clip: float | None
) -> None:
    """Raise where an estimator's method is not known or does not fit the task or the settings."""
    if isinstance(method, Method):
        for name, value in (("learning_rate", learning_rate), ("clip", clip)):
            if value is not None:
                raise ValueError(f"{name}={value}: the method object has its own; set it there")
        return
    if method not in METHODS:
        names = ", ".join(map(repr, METHODS))
        raise ValueError(
            f"method={method!r}: must be one of {names}, or a method's settings such as "
            f"dpbnn.SGLD(learning_rate=1e-5)"
        )
    recipe = METHODS[method]
    if not (recipe.classifies or regression):
        raise ValueError(f"method={method!r}: is for regression; use another, such as 'sgld'")
    if regression and not recipe.regresses:
        raise ValueError(f"method={method!r}: is for classes; use another, such as 'sgld'")


def is_auto(hidden: Any) -> bool:
    """Return whether the number of hidden layers is left to the recipe."""
    return isinstance(hidden, str) and hidden == "auto"


def widths(hidden: Any) -> tuple[int, ...]:
    """Return the widths of the hidden layers that a user gave, or raise; one layer for "auto"."""
    if is_auto(hidden):
        return (_WIDTH,)
    try:
        found = [int(width) for width in np.atleast_1d(hidden)]
        whole = found == list(np.atleast_1d(hidden)) and min(found, default=1) > 0
    except (TypeError, ValueError):
        whole = False
    if not whole:
        raise ValueError(
            f"hidden={quoted(hidden)}: must be widths of layers, such as (32,) or (), or 'auto'"
        )
    return tuple(found)


def of_auto(hidden: tuple[int, ...], classes: int | None) -> Recipe:
    """Return what "auto" takes: for a linear model, the method that models the noise.

    Args:
        hidden: widths of the hidden layers.
        classes: number of classes; None for a regression.
    """
    linear = not hidden and classes in (None, 2)
    return METHODS["moments" if linear else "auto"]


def for_features(recipe: Recipe, regression: bool) -> Recipe:
    """Return a recipe for fixed features of images: nothing is standardised before them."""
    if recipe is METHODS["auto"]:
        return _HEADS[regression]
    if recipe.linear:
        raise ValueError(
            f"features: {recipe.method.__name__} is for few columns, and these are thousands; use "
            f"method='auto'"
        )
    return dataclasses.replace(recipe, standardise=False, curved=False, bands=False)


def is_chain(name: str) -> bool:
    """Return whether the method of that name samples by a Markov chain."""
    return name in METHODS and METHODS[name].langevin
