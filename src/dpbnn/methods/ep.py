"""EP and the SEP of Li et al.: one record at a time, as references that are not private."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.methods.ep_blocks import BlockEPProcess
from dpbnn.methods.method import Method, OpenProcess, Problem
from dpbnn.mixtures import GaussianMixture
from dpbnn.moments import MixtureMoments, Natural, NetworkMoments
from dpbnn.moments.sequential import Array, Gamma, PriorSites, SequentialNetwork, usable
from dpbnn.privacy.checks import check_numbers

if TYPE_CHECKING:
    from dpbnn.posteriors import Posterior
    from dpbnn.privacy.plan import Plan

__all__ = ["EP"]

_FEWEST = 10  # records
_FAR = 1e12  # largest mean of a weight


def check_records(n: int) -> None:
    """Refuse data that is too small for expectation propagation."""
    if n < _FEWEST:
        raise ValueError(f"n={n}: expectation propagation needs {_FEWEST} records or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Method):
    """Settings of methods that visit records one at a time; they need an open plan.

    Every step of the plan visits its records in a new random order, so
    `open_plan(n=n, sampling="full-batch", steps=40)` is 40 passes. With `Gaussian(None)` the noise
    precision is learned, with a Gamma(6, 6) prior.

    Attributes:
        refine: learn the prior's precision as well, with a Gamma(6, 6) prior and one sweep over
            the prior's factors after every pass; the `prior` of `fit` is then only the start.
    """

    refine: bool = True

    own_noise = True

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan, which must be open."""
        if plan.private:
            raise ValueError(
                f"{type(self).__name__} is not private: it visits raw records; use dpbnn.SEP(...) "
                f"with this plan, or dpbnn.open_plan(...)"
            )
        check_records(plan.n)
        return plan, math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class EP(Sequential):
    """Expectation propagation for ReLU networks; not private.

        cavity = q / f_i,   f_i <- f_i^(1-s) (matched / cavity)^s,   q <- cavity f_i

    Every record has its own factor, or all share one (`shared`: the SEP of Li et al. 2015, where
    the factor then is (q / prior)^(1/n)).

    Attributes:
        damping: s; the authors use 0.4 for EP and 1 for SEP.
        shared: one factor for all records.
    """

    damping: float = 0.4
    shared: bool = False

    name = "ep"

    def __post_init__(self) -> None:
        check_numbers(damping=self.damping)
        if not (0 < self.damping <= 1):
            raise ValueError(f"damping={self.damping}: must lie in (0, 1]")

    def start(self, problem: Problem) -> OpenProcess:
        """Return a process at its first step."""
        problem.refuse_frozen("expectation propagation")
        if isinstance(problem.origin, GaussianMixture):
            return BlockEPProcess(self, problem, MixtureMoments(problem.origin, problem.prior))
        return EPProcess(self, problem)


class SequentialProcess(OpenProcess):
    """Natural parameters of q, the prior's sites and the noise, on small matrices."""

    def __init__(self, settings: Sequential, problem: Problem) -> None:
        self.settings, self.problem, self.model = settings, problem, problem.model
        self.moments = NetworkMoments(
            problem.origin, problem.likelihood, problem.prior, problem.n, noise_start=1.2
        )
        layers = list(self.moments.layers.values())
        if layers[-1].linear.out_features != 1:
            raise UnsupportedModel(
                f"the network has {layers[-1].linear.out_features} outputs; "
                f"{type(settings).__name__} needs one"
            )
        shapes = [(m.shape[0], m.shape[1]) for m in self.moments.means.values()]
        self.network = SequentialNetwork(shapes, [bool(layer.bias) for layer in layers])
        means = [m.cpu().numpy().reshape(-1) for m in self.moments.means.values()]
        precision = self.moments.precision
        self.first = np.concatenate(means) * precision
        self.second = np.full(self.network.size, precision)
        self.prior = PriorSites(self.network.size, Gamma(6.0, 5.0 / precision))
        self.noise = Gamma(6.0, 5.0 * self.moments.noise)
        self.steps = 0

    @property
    def learned(self) -> bool:
        """Whether the noise is learned."""
        return self.moments.learned

    def visit(self, x: Tensor, y: Tensor, records: Tensor) -> None:
        """Visit the records once, in a new random order, and refine the prior."""
        order = torch.randperm(len(x)).numpy()
        inputs = x.flatten(1).double().cpu().numpy()
        targets = y.reshape(len(y)).double().cpu().numpy()
        names = records.numpy()
        with np.errstate(all="ignore"):
            for i in order:
                self.record(int(names[i]), inputs[i], float(targets[i]))
        if self.settings.refine:
            self.prior.sweep(self.first, self.second)
        reach = _FAR * self.second
        np.clip(self.first, -reach, reach, out=self.first)
        self.steps += 1

    def record(self, index: int, x: Array, y: float) -> None:
        """Update on one record."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """The noise variance."""
        return self.noise.variance if self.learned else self.moments.noise

    def natural(self) -> Natural:
        """Return q as tensors."""
        parts = (self.network.layers(part.copy()) for part in (self.first, self.second))
        first, second = (
            {n: torch.from_numpy(v) for n, v in zip(self.moments.layers, part, strict=True)}
            for part in parts
        )
        return Natural(first, second)

    def posterior(self, **record: Any) -> Posterior:
        """Return the Gaussian posterior, which predicts by propagating moments."""
        if self.learned:
            self.moments.noise = self.noise.variance
        return self.moments.posterior(self.natural(), **record)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on from here, as tensors."""
        found = {name: torch.from_numpy(value.copy()) for name, value in self._arrays().items()}
        gammas = (self.noise, self.prior.gamma)
        found["gammas"] = torch.tensor([[g.a, g.b] for g in gammas], dtype=torch.float64)
        found["steps"] = torch.tensor(self.steps)
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        for name, value in self._arrays().items():
            value[...] = state[name].cpu().numpy()
        self.noise, self.prior.gamma = (Gamma(*g.tolist()) for g in state["gammas"])
        self.steps = int(state["steps"])

    def _arrays(self) -> dict[str, Array]:
        """Return the arrays that a pass changes, by name."""
        prior = {f"prior.{n}": getattr(self.prior, n) for n in ("first", "second", "a", "b")}
        return {"first": self.first, "second": self.second, **prior}


class EPProcess(SequentialProcess):
    """State and updates of `EP`."""

    settings: EP

    def __init__(self, settings: EP, problem: Problem) -> None:
        super().__init__(settings, problem)
        rows = 1 if settings.shared else problem.n
        self.sites1 = np.tile(self.first / problem.n, (rows, 1))
        self.sites2 = np.zeros((rows, self.network.size))
        self.gammas = np.zeros((rows, 2))

    def record(self, index: int, x: Array, y: float) -> None:
        """Update on one record, and its factor."""
        damping = self.settings.damping
        at, share = (0, 1 / self.problem.n) if self.settings.shared else (index, 1.0)
        site1, site2 = self.sites1[at], self.sites2[at]
        cavity1, cavity2 = self.first - site1, self.second - site2
        bad = cavity2 <= 0
        if bad.any():
            cavity1, cavity2 = (
                np.where(bad, self.first, cavity1), np.where(bad, self.second, cavity2)
            )  # fmt: skip
        v = 1 / cavity2
        noise = self.noise
        if self.learned:
            a, b = self.gammas[at].tolist()
            outside = Gamma(noise.a - a, noise.b - b)
            noise = outside if outside.valid else noise
        scale = noise.variance if self.learned else self.moments.noise
        m = v * cavity1
        tilted = self.network.tilted(m, v, x, y, scale)
        left = 1 - v * tilted.curvature
        precision = cavity2 / left
        move1 = damping * ((m + v * tilted.slope) * precision - cavity1 - site1)
        move2 = damping * (precision - cavity2 - site2)
        good = usable(np.minimum(self.second + move2, precision))
        if good is not None:
            move1, move2 = np.where(good, move1, 0.0), np.where(good, move2, 0.0)
        if np.isfinite(move1.sum()):
            self.first += move1
            self.second += move2
            site1 += share * move1
            site2 += share * move2
        if self.learned:
            new = noise.tilted(tilted.squared, tilted.v)
            site = self.gammas[at]
            move = damping * (np.array([new.a - noise.a, new.b - noise.b]) - site)
            moved = Gamma(self.noise.a + float(move[0]), self.noise.b + float(move[1]))
            if moved.valid:
                self.noise = moved
                site += share * move

    def _arrays(self) -> dict[str, Array]:
        own = {"sites1": self.sites1, "sites2": self.sites2, "site_gammas": self.gammas}
        return {**super()._arrays(), **own}
