"""SEP and DP-SEP: stochastic expectation propagation, whose factors pass the gate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpbnn.methods.ep import EP, check_records
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import Average, State
from dpbnn.mixtures import GaussianMixture
from dpbnn.moments import (
    Coordinates,
    FactorContributions,
    MixtureMoments,
    MomentModel,
    Natural,
    NetworkMoments,
    Raw,
    Whitened,
)
from dpbnn.moments.model import applied
from dpbnn.privacy.checks import check_positive

if TYPE_CHECKING:
    from dpbnn.posteriors import Posterior
    from dpbnn.privacy.plan import Plan

__all__ = ["SEP", "moment_model"]

_MOST = 1e12  # largest precision, in units of the prior's
_FAR = 1e3  # largest mean, in prior standard deviations


@dataclasses.dataclass(frozen=True, kw_only=True)
class SEP(Method):
    """Stochastic expectation propagation; under a private plan it is DP-SEP.

    One factor f stands for every record: q = prior f^n, and the cavity is q / f. With f_i the
    matched factor of record i, in natural parameters,

        q <- q + rho (n/b) sum_i (f_i - f)

    over a batch of expected size b. An example contributes f_i - f in coordinates in which the
    cavity is a standard normal, (L^T (f_1 - f_2 m), L^T f_2 L) with V = L L^T; the cavity is
    public, so the sensitivity is the clip. Precisions that noise makes too small are projected,
    in the update, and no step is ever skipped. Averages of the (public) trajectory are free.

    The prior is that of the network's weights times the root of the number of inputs of their
    layer. With `likelihood=Gaussian(None)` the noise variance is learned, as one more clipped
    coordinate.

    Attributes:
        step_size: rho, or its first and last value; it falls geometrically. 1 forgets all at once.
        clip: largest norm of one record's contribution.
        coordinates: "whitened", or "raw" for the natural parameters themselves.
        weight: of the precision coordinates against those of the mean.
        momentum: of the steps.
        trust: most standard deviations of the cavity that a step moves a mean, and most that it
            multiplies a precision's change by; None for no limit.
        average: None; "polyak", the mean over the last half of the steps; or the share of the
            last steps to average over, such as 0.2.
        start_variance: variance of the first approximation, as a share of the prior's.
        heat: factor on the noise variance at the first step, falling to 1 over `cooling`.
        cooling: share of the steps.
        floor: smallest precision, as a share of the prior's.
        blocks: number of separately clipped blocks: 1, or 2 for means and precisions.
        always_clip: clip under an open plan as well, which is the paper's "clipped SEP".
        printed: the update as the DP-SEP paper prints it; see `paper`.
    """

    step_size: float | tuple[float, float] = (0.03, 0.01)
    clip: float = 0.2
    coordinates: str = "whitened"
    weight: float = 1.0
    momentum: float = 0.0
    trust: float | None = 1.0
    average: str | float | None = "polyak"
    start_variance: float = 1.0
    heat: float = 1.0
    cooling: float = 0.5
    floor: float = 0.5
    blocks: int = 1
    always_clip: bool = False
    printed: bool = False

    name = "sep"
    own_noise = True

    def __post_init__(self) -> None:
        if isinstance(self.step_size, tuple) and len(self.step_size) != 2:
            raise ValueError(
                f"step_size={self.step_size}: must be a number, or a pair (first, last)"
            )
        first, last = self.rates
        check_positive(
            clip=self.clip,
            step_size=min(first, last),
            weight=self.weight,
            start_variance=self.start_variance,
            heat=self.heat,
            floor=self.floor,
            trust=1.0 if self.trust is None else self.trust,
        )
        if not (0 <= self.momentum < 1):
            raise ValueError(f"momentum={self.momentum}: must lie in [0, 1)")
        if not (0 <= self.cooling <= 1):
            raise ValueError(f"cooling={self.cooling}: must lie in [0, 1]")
        if self.coordinates not in ("whitened", "raw"):
            raise ValueError(
                f"coordinates={self.coordinates!r}: must be 'whitened' or 'raw'; the default is "
                f"'whitened'"
            )
        if self.blocks not in (1, 2):
            raise ValueError(f"blocks={self.blocks}: must be 1, or 2 for means and precisions")
        share = isinstance(self.average, float) and 0 < self.average <= 1
        if self.average not in (None, "polyak") and not share:
            raise ValueError(
                f"average={self.average!r}: must be None, 'polyak' or a share in (0, 1]"
            )

    @classmethod
    def paper(cls, *, gamma: float = 1.0, clip: float = 1.0, **settings: Any) -> SEP:
        """Return Algorithm 3 of the DP-SEP paper as printed.

            theta <- (gamma/N) f_i + (N - gamma/N) f + prior + noise,   f <- (theta - prior)/N,

        f_i clipped to C in raw natural parameters, and f, the prior and the start too; with an
        expected batch size b the sum of f_i takes the place of f_i, and b gamma/N f is taken off.
        Run it on
        `plan(sampling="partition", batch_size=1, relation="replace-one")`: a pass visits every
        record once and no order is secret, so nothing is amplified, and the sensitivity of theta
        is the printed 2 gamma C/N (times sqrt(2) with blocks=2).

        Args:
            gamma: the damping value.
            clip: C.
            **settings: other settings.
        """
        return cls(
            step_size=gamma,
            clip=clip,
            **{
                "coordinates": "raw", "printed": True, "average": None, "floor": 1e-4,
                "trust": None, **settings,
            },
        )  # fmt: skip

    @classmethod
    def original(cls, *, refine: bool = True) -> EP:
        """Return the SEP of Li et al. (2015) for networks, one record at a time; not private.

        Weight 1 on every factor, with the noise and the prior's precision learned as in their
        experiments; it is EP with one shared factor.

        Args:
            refine: learn the prior's precision.
        """
        return EP(shared=True, damping=1.0, refine=refine)

    @property
    def rates(self) -> tuple[float, float]:
        """First and last step size."""
        if isinstance(self.step_size, tuple):
            return self.step_size
        return (self.step_size, self.step_size)

    def settled(self, plan: Plan) -> tuple[Plan, float | dict[str, float]]:
        """Return the plan as it is, and the clip of every block."""
        check_records(plan.n)
        if not (plan.private or self.always_clip):
            return plan, math.inf
        if self.blocks == 1:
            return plan, self.clip
        return plan, {"mean.": self.clip, "precision.": self.clip}

    def start(self, problem: Problem) -> SEPProcess:
        """Return the process that trains on a problem."""
        model = moment_model(problem, start_variance=self.start_variance)
        if self.blocks > 1 and model.extra():
            raise ValueError("blocks=2: a learned noise needs blocks=1; or give its noise_std")
        return SEPProcess(self, problem, model)


def moment_model(problem: Problem, **options: Any) -> MomentModel:
    """Return the moment model of a problem: that of a mixture, or of a ReLU network."""
    problem.refuse_frozen("expectation propagation")
    if isinstance(problem.origin, GaussianMixture):
        return MixtureMoments(problem.origin, problem.prior, **options)
    return NetworkMoments(problem.origin, problem.likelihood, problem.prior, problem.n, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SEPState(State):
    """State of `SEP`; the network itself stays as it was.

    Attributes:
        q: the approximation.
        noise: variance of the likelihood's noise.
        velocity: of momentum, by released name.
        average: of means (`first`) and precisions (`second`), by block.
    """

    q: Natural
    noise: float
    velocity: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    average: Average = dataclasses.field(default_factory=Average)


class SEPProcess(Process[SEPState]):
    """Equations of `SEP`."""

    def __init__(self, settings: SEP, problem: Problem, moments: MomentModel) -> None:
        super().__init__(problem)
        self.settings, self.moments = settings, moments
        device = next(problem.model.parameters()).device
        self.prior = _on(moments.prior(), device)
        if settings.printed:
            self.prior = self._clipped(self.prior)

    def begin(self) -> SEPState:
        """Return the state before the first step."""
        q = _on(self.moments.start(), next(self.model.parameters()).device)
        if self.settings.printed:
            q = self.prior.plus(self._clipped(self.shared(q)), self.problem.n)
        return SEPState(q=q, noise=self.moments.noise)

    def shared(self, q: Natural) -> Natural:
        """Return the factor that stands for every record."""
        return q.plus(self.prior, -1.0).times(1 / self.problem.n)

    def _clipped(self, natural: Natural) -> Natural:
        """Return natural parameters scaled to joint norm C, or every block to C."""
        parts = [natural.first, natural.second]
        norms = [math.sqrt(sum(float(v.square().sum()) for v in part.values())) for part in parts]
        if self.settings.blocks == 1:
            norms = [math.hypot(*norms)] * 2
        a, b = (min(1.0, self.settings.clip / max(norm, 1e-300)) for norm in norms)
        return Natural(
            {n: a * v for n, v in natural.first.items()},
            {n: b * v for n, v in natural.second.items()},
        )

    def coordinates(self, state: SEPState) -> Coordinates:
        """Return the coordinates at the cavity, which is public."""
        cavity = state.q.plus(self.shared(state.q), -1.0).moments()
        kind = Whitened if self.settings.coordinates == "whitened" else Raw
        return kind(cavity, self.settings.weight)

    def contribute(self, state: SEPState, x: Any, y: Tensor) -> FactorContributions:
        """Return every example's factor less the shared one."""
        settings, coordinates = self.settings, self.coordinates(state)
        offset: dict[str, Tensor] = {}
        if not settings.printed:
            vectors = coordinates.vectors(coordinates.centred(self.shared(state.q)))
            dtype = next(self.model.parameters()).dtype
            offset = {name: value[0].to(dtype) for name, value in vectors.items()}
        done = state.steps / max(1, self.problem.steps)
        left = max(0.0, 1 - done / settings.cooling) if settings.cooling else 0.0
        moments = self.moments.at(settings.heat**left * state.noise)
        return FactorContributions(moments, coordinates, offset, x, y, self.problem.microbatch_size)

    def rate(self, steps: int) -> float:
        """Return the step size after so many steps."""
        first, last = self.settings.rates
        return first * (last / first) ** (steps / max(1, self.problem.steps - 1))

    def update(self, state: SEPState, release: Mapping[str, Tensor]) -> SEPState:
        """Move the natural parameters, project them, and average."""
        settings, problem = self.settings, self.problem
        rate, coordinates = self.rate(state.steps), self.coordinates(state)
        velocity, noise = state.velocity, state.noise
        with torch.no_grad():
            extra = {n[6:]: v / problem.batch_size for n, v in release.items() if "extra." in n}
            if settings.printed:
                damped = settings.rates[0] / problem.n
                damped_shared = damped * problem.batch_size
                moved = state.q.plus(coordinates.factor(release), damped)
                moved = moved.plus(self.shared(state.q), -damped_shared)
            else:
                keep = settings.momentum
                velocity = {
                    n: keep * velocity[n] + v if n in velocity else v for n, v in release.items()
                }
                scale = rate * problem.n / problem.batch_size
                moves = {n: self._limited(coordinates, n, scale * v) for n, v in velocity.items()}
                moved = state.q.plus(coordinates.factor(moves))
            q = self._projected(moved, state.q)
            if settings.printed:
                again = self.prior.plus(self._clipped(self.shared(q)), problem.n)
                q = self._projected(again, q)
            if extra:
                noise = self.moments.at(noise).moved_noise(extra, rate)
        average = state.average
        if settings.average is not None:
            share = settings.average if isinstance(settings.average, float) else 0.5
            values = {f"first.{n}": v for n, v in q.moments().mean.items()}
            values |= {f"second.{n}": v for n, v in q.second.items()}
            average = average.add(values, state.steps + 1, problem.steps, share=share)
        return SEPState(steps=state.steps + 1, q=q, noise=noise, velocity=velocity, average=average)

    def _limited(self, coordinates: Coordinates, name: str, move: Tensor) -> Tensor:
        """Return a move in whitened coordinates, cut off at the trusted size."""
        trust = self.settings.trust
        if trust is None or self.settings.coordinates == "raw":
            return move
        if name.startswith("precision."):
            most = trust * self.settings.weight
            return coordinates.limited(name, move, -most / 2, most)
        return move.clamp(-trust, trust)

    def _projected(self, natural: Natural, before: Natural) -> Natural:
        """Return valid parameters: precisions of at least a share of the prior's, means in reach.

        What has overflowed stays where it was.
        """
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for name, precision in natural.second.items():
            least = self.prior.second[name]
            value = natural.first[name]
            value = torch.where(value.isfinite(), value, before.first[name])
            precision = torch.where(precision.isfinite(), precision, before.second[name])
            low, high = self.settings.floor, _MOST
            if precision.dim() == value.dim():
                second[name] = torch.clamp(precision, low * least, high * least)
                reach = _FAR * second[name] * least.rsqrt()
                value = value.clamp(-reach, reach)
            else:
                root = torch.linalg.cholesky(least)
                inverse = torch.linalg.inv(root)
                values, vectors = torch.linalg.eigh(inverse @ precision @ inverse.mT)
                inner = vectors * values.clamp(low, high).unsqueeze(-2) @ vectors.mT
                fixed = root @ inner @ root.mT
                second[name] = (fixed + fixed.mT) / 2
            first[name] = value
        return Natural(first, second)

    def final(self, state: SEPState) -> Natural:
        """Return the last approximation, or the average."""
        if not state.average.count:
            return state.q
        means, second = (
            {n: state.average.values[f"{kind}.{n}"] for n in state.q.first}
            for kind in ("first", "second")
        )
        return Natural({n: applied(second[n], m) for n, m in means.items()}, second)

    def posterior(self, state: SEPState, **record: Any) -> Posterior:
        """Return the Gaussian posterior, which predicts by propagating moments."""
        return self.moments.at(state.noise).posterior(self.final(state), **record)


def _on(natural: Natural, device: torch.device) -> Natural:
    return Natural(
        {n: v.to(device) for n, v in natural.first.items()},
        {n: v.to(device) for n, v in natural.second.items()},
    )
