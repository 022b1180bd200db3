"""Default settings: functions of public numbers, the same for every table.

They were chosen on splits of the training parts of public tables (benchmarks/tables.py names them
and repeats the comparison), at epsilon 1, for accuracy and calibration together. They may not
depend on the data that is fitted, except for its number of rows, which is public.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from dpbnn import methods
from dpbnn.methods.method import Method
from dpbnn.methods.sgld import Langevin
from dpbnn.networks import mlp
from dpbnn.privacy.plan import Plan, open_plan, plan

__all__ = ["METHODS", "Recipe", "default_delta"]

_BATCH = 1024
_ALL = 2048  # rows up to which every step uses all of them
_FEW = 400  # rows below which a classifier's steps shrink with n, so that its clip does not
_NOISE = 0.25  # std of scaled targets below which step sizes shrink with it
_KEPT = 100  # stored iterates of a chain, from its second half


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
        regresses: whether it has one for numbers.
    """

    method: type[Method]
    rate: float | None
    regression_rate: float | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dropout: float = 0.0
    classifies: bool = True
    regresses: bool = True

    @property
    def langevin(self) -> bool:
        """Whether clip, learning rate and noise are tied to each other."""
        return issubclass(self.method, Langevin)

    def settings(
        self,
        plan: Plan,
        noise_std: float | None,
        regression: bool,
        learning_rate: float | None,
        clip: float | None,
    ) -> Method:
        """Return the method's settings for a plan.

        Args:
            plan: of the training.
            noise_std: of scaled targets, where it is fixed; the smaller, the steeper the posterior
                and the smaller the steps of Langevin methods.
            regression: whether the target is a number.
            learning_rate: the user's, if any.
            clip: the user's, if any.
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
            if clip is not None:
                options["clip"] = clip
            rate = rate or (self.regression_rate if regression else self.rate)
            return self.method(learning_rate=rate, **options)  # type: ignore[call-arg]
        options |= {"keep": _KEPT, "thin": max(1, plan.steps // (2 * _KEPT))}
        if rate is None and clip is not None and plan.private:
            unit = self.method(**options).unit(plan.n, plan.batch_size)  # type: ignore[attr-defined]
            rate = (unit / (clip * plan.noise_multiplier)) ** 2
        elif rate is None:
            rate = self._langevin_rate(plan.n, noise_std, regression)
            clip = None
        return self.method(learning_rate=rate, clip=clip, **options)  # type: ignore[call-arg]

    def _langevin_rate(self, n: int, noise_std: float | None, regression: bool) -> float:
        if not regression:
            return self.rate * min(1.0, n / _FEW) / n
        factor = 1.0 if noise_std is None else min(1.0, (noise_std / _NOISE) ** 2)
        return self.regression_rate * factor / n


_ADAM = {"optimizer": "adam", "average": "polyak", "clip": 3.0}

METHODS: dict[str, Recipe] = {
    "sgld": Recipe(methods.SGLD, 0.25, 0.05),
    "sghmc": Recipe(methods.SGHMC, 0.0125, 0.0025),
    "sgd": Recipe(methods.SGD, 0.02, 0.02, _ADAM),
    "bbp": Recipe(methods.BBP, 0.02, 0.02, _ADAM),
    "vi": Recipe(methods.VI, 0.02, 0.02, _ADAM),
    "mcdropout": Recipe(methods.MCDropout, 0.02, 0.02, _ADAM, dropout=0.1),
    "noiseaware": Recipe(methods.NoiseAware, None, None, regresses=False),
    "sep": Recipe(methods.SEP, None, None, classifies=False),
}


def default_delta(n: int) -> float:
    """Return min(1e-5, 1/(10 n)), so that delta is well below 1/n."""
    return min(1e-5, 1 / (10 * n))


def network(
    features: int, hidden: tuple[int, ...], outputs: int, dropout: float
) -> Callable[[], torch.nn.Module]:
    """Return what builds the network."""
    return functools.partial(mlp, features, hidden, outputs, dropout)


def settled_plan(
    n: int,
    epsilon: float | None,
    delta: float,
    batch_size: float | None,
    epochs: float | None,
    beside: tuple[Any, ...] = (),
) -> Plan:
    """Return the plan of a fit; all records at once where batch_size is n.

    Without batch_size it is n up to 2048 rows and 1024 beyond. Without epochs there are 400 steps
    (without privacy, where steps cost nothing, 1000), or one pass over the data if that is more.
    """
    size = (n if n <= _ALL else _BATCH) if batch_size is None else batch_size
    length: dict[str, Any] = {"epochs": epochs}
    if epochs is None:
        length = {"steps": max(1000 if epsilon is None else 400, -(-n // max(1, int(size))))}
    if size >= n:
        size, sampling = n, "full-batch"
    else:
        sampling = "poisson"
    if epsilon is None:
        return open_plan(n=n, batch_size=size, sampling=sampling, **length)
    return solved_plan(
        epsilon=epsilon,
        delta=delta,
        n=n,
        batch_size=size,
        sampling=sampling,
        beside=beside,
        **length,
    )


@functools.lru_cache(maxsize=256)
def solved_plan(**arguments: Any) -> Plan:
    """Solve for the noise once for all fits of a search that share their public numbers."""
    return plan(**arguments)
