"""EP and the SEP of Li et al.: one record at a time, as references that are not private."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.methods.ep_blocks import BlockEPProcess
from dpbnn.methods.method import Method, OpenProcess, Problem
from dpbnn.methods.state import State
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

    def start(self, problem: Problem) -> OpenProcess[Any]:
        """Return the process that trains on a problem."""
        problem.refuse_frozen("expectation propagation")
        if isinstance(problem.origin, GaussianMixture):
            return BlockEPProcess(self, problem, MixtureMoments(problem.origin, problem.prior))
        return EPProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialState(State):
    """State of methods that visit records one at a time, on flat arrays of all weights.

    Attributes:
        first: precision times mean of q.
        second: precision of q.
        prior: its sites.
        noise: of the likelihood.
        sites: of EP, every record's factor, or one that all share: natural parameters (first,
            second), and the noise's part.
    """

    first: Array
    second: Array
    prior: PriorSites
    noise: Gamma
    sites: tuple[Array, ...] = ()


class SequentialProcess(OpenProcess[SequentialState]):
    """Equations that EP and ADF share, on small matrices."""

    def __init__(self, settings: Sequential, problem: Problem) -> None:
        super().__init__(problem)
        self.settings = settings
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

    def begin(self) -> SequentialState:
        """Return the state before the first step."""
        means = [m.cpu().numpy().reshape(-1) for m in self.moments.means.values()]
        precision, size = self.moments.precision, self.network.size
        return SequentialState(
            first=np.concatenate(means) * precision,
            second=np.full(size, precision),
            prior=PriorSites.start(size, Gamma(6.0, 5.0 / precision)),
            noise=Gamma(6.0, 5.0 * self.moments.noise),
        )

    def visit(
        self, state: SequentialState, x: Tensor, y: Tensor, records: Tensor
    ) -> SequentialState:
        """Visit the records once, in a new random order, and refine the prior."""
        order = torch.randperm(len(x)).numpy()
        inputs = x.flatten(1).double().cpu().numpy()
        targets = y.reshape(len(y)).double().cpu().numpy()
        names = records.numpy()
        noise, prior = state.noise, state.prior
        with np.errstate(all="ignore"):
            for i in order:
                noise = self.record(state, noise, int(names[i]), inputs[i], float(targets[i]))
        if self.settings.refine:
            prior = prior.swept(state.first, state.second)
        reach = _FAR * state.second
        np.clip(state.first, -reach, reach, out=state.first)
        return dataclasses.replace(state, steps=state.steps + 1, noise=noise, prior=prior)

    @abstractmethod
    def record(self, state: SequentialState, noise: Gamma, index: int, x: Array, y: float) -> Gamma:
        """Move q on one record, in place, and return what becomes of the noise."""

    def scale(self, noise: Gamma) -> float:
        """Return the noise variance."""
        return noise.variance if self.moments.learned else self.moments.noise

    def natural(self, state: SequentialState) -> Natural:
        """Return q as tensors."""
        parts = (self.network.layers(part.copy()) for part in (state.first, state.second))
        first, second = (
            {n: torch.from_numpy(v) for n, v in zip(self.moments.layers, part, strict=True)}
            for part in parts
        )
        return Natural(first, second)

    def posterior(self, state: SequentialState, **record: Any) -> Posterior:
        """Return the Gaussian posterior, which predicts by propagating moments."""
        return self.moments.at(self.scale(state.noise)).posterior(self.natural(state), **record)


class EPProcess(SequentialProcess):
    """Equations of `EP`."""

    settings: EP

    def begin(self) -> SequentialState:
        """Return the state before the first step."""
        state, n = super().begin(), self.problem.n
        rows = 1 if self.settings.shared else n
        first = np.tile(state.first / n, (rows, 1))
        return dataclasses.replace(state, sites=(first, np.zeros_like(first), np.zeros((rows, 2))))

    def factor(self, first: Array, second: Array) -> tuple[Array, Array]:
        """Return a record's factor, matched over cavity, as it is used."""
        return first, second

    def record(self, state: SequentialState, noise: Gamma, index: int, x: Array, y: float) -> Gamma:
        """Move q and the record's factor, in place, and return what becomes of the noise."""
        damping = self.settings.damping
        at, share = (0, 1 / self.problem.n) if self.settings.shared else (index, 1.0)
        site1, site2, site = (part[at] for part in state.sites)
        cavity1, cavity2 = state.first - site1, state.second - site2
        bad = cavity2 <= 0
        if bad.any():
            cavity1, cavity2 = (
                np.where(bad, state.first, cavity1), np.where(bad, state.second, cavity2)
            )  # fmt: skip
        v = 1 / cavity2
        whole = noise
        if self.moments.learned:
            a, b = site.tolist()
            outside = Gamma(noise.a - a, noise.b - b)
            noise = outside if outside.valid else noise
        m = v * cavity1
        tilted = self.network.tilted(m, v, x, y, self.scale(noise))
        left = 1 - v * tilted.curvature
        precision = cavity2 / left
        first = (m + v * tilted.slope) * precision - cavity1
        first, second = self.factor(first, precision - cavity2)
        move1, move2 = damping * (first - site1), damping * (second - site2)
        good = usable(np.minimum(state.second + move2, precision))
        if good is not None:
            move1, move2 = np.where(good, move1, 0.0), np.where(good, move2, 0.0)
        if np.isfinite(move1.sum()):
            np.add(state.first, move1, out=state.first)
            np.add(state.second, move2, out=state.second)
            site1 += share * move1
            site2 += share * move2
        if self.moments.learned:
            new = noise.tilted(tilted.squared, tilted.v)
            move = damping * (np.array([new.a - noise.a, new.b - noise.b]) - site)
            moved = Gamma(whole.a + float(move[0]), whole.b + float(move[1]))
            if moved.valid:
                site += share * move
                return moved
        return whole
