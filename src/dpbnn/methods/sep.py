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
        """Return a process at its first step."""
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


class SEPProcess(Process):
    """State and updates of `SEP`."""

    def __init__(self, settings: SEP, problem: Problem, moments: MomentModel) -> None:
        self.settings, self.problem, self.model = settings, problem, problem.model
        self.moments = moments
        self.steps = 0
        device = next(problem.model.parameters()).device
        self.prior = _on(moments.prior(), device)
        self.q = _on(moments.start(), device)
        if settings.printed:
            self.prior = self._clipped(self.prior)
            self.q = self.prior.plus(self._clipped(self._shared()), problem.n)
        self.velocity: dict[str, Tensor] = {}
        self.mean: Natural | None = None
        self.averaged = 0
        self._prepare()

    def _shared(self) -> Natural:
        return self.q.plus(self.prior, -1.0).times(1 / self.problem.n)

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

    def _prepare(self) -> None:
        """Set the cavity, its coordinates and the shared factor in them; all public."""
        settings = self.settings
        shared = self._shared()
        cavity = self.q.plus(shared, -1.0).moments()
        kind: type[Coordinates] = Whitened if settings.coordinates == "whitened" else Raw
        self.coordinates = kind(cavity, settings.weight)
        self.offset: dict[str, Tensor] = {}
        if not settings.printed:
            vectors = self.coordinates.vectors(self.coordinates.centred(shared))
            dtype = next(self.model.parameters()).dtype
            self.offset = {name: value[0].to(dtype) for name, value in vectors.items()}
        done = self.steps / max(1, self.problem.steps)
        left = max(0.0, 1 - done / settings.cooling) if settings.cooling else 0.0
        self.moments.temper(settings.heat**left)

    def contribute(self, x: Any, y: Tensor) -> FactorContributions:
        """Return every example's factor less the shared one."""
        return FactorContributions(
            self.moments, self.coordinates, self.offset, x, y, self.problem.microbatch_size
        )

    @property
    def rate(self) -> float:
        """The step size of the next step."""
        first, last = self.settings.rates
        return first * (last / first) ** (self.steps / max(1, self.problem.steps - 1))

    def update(self, release: Mapping[str, Tensor]) -> None:
        """Move the natural parameters, project them, and average."""
        settings, problem = self.settings, self.problem
        with torch.no_grad():
            extra = {n[6:]: v / problem.batch_size for n, v in release.items() if "extra." in n}
            if settings.printed:
                factor = self.coordinates.factor(release)
                damped = settings.rates[0] / problem.n
                damped_shared = damped * problem.batch_size
                moved = self.q.plus(factor, damped).plus(self._shared(), -damped_shared)
            else:
                keep = settings.momentum
                for name, value in release.items():
                    before = self.velocity.get(name)
                    self.velocity[name] = value if before is None else keep * before + value
                scale = self.rate * problem.n / problem.batch_size
                moves = {n: self._limited(n, scale * v) for n, v in self.velocity.items()}
                moved = self.q.plus(self.coordinates.factor(moves))
            self.q = self._projected(moved)
            if settings.printed:
                self.q = self._projected(self.prior.plus(self._clipped(self._shared()), problem.n))
            if extra:
                self.moments.learn(extra, self.rate)
            self.steps += 1
            self._average()
            self._prepare()

    def _limited(self, name: str, move: Tensor) -> Tensor:
        """Return a move in whitened coordinates, cut off at the trusted size."""
        trust = self.settings.trust
        if trust is None or self.settings.coordinates == "raw":
            return move
        if name.startswith("precision."):
            most = trust * self.settings.weight
            return self.coordinates.limited(name, move, -most / 2, most)
        return move.clamp(-trust, trust)

    def _projected(self, natural: Natural) -> Natural:
        """Return valid parameters: precisions of at least a share of the prior's, means in reach.

        What has overflowed stays where it was.
        """
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for name, precision in natural.second.items():
            least = self.prior.second[name]
            value = natural.first[name]
            value = torch.where(value.isfinite(), value, self.q.first[name])
            precision = torch.where(precision.isfinite(), precision, self.q.second[name])
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

    def _average(self) -> None:
        """Average means and precisions over the last steps."""
        kind = self.settings.average
        if kind is None:
            return
        share = kind if isinstance(kind, float) else 0.5
        if self.steps <= (1 - share) * self.problem.steps:
            return
        self.averaged += 1
        now = Natural(self.q.moments().mean, self.q.second)
        if self.mean is None:
            self.mean = now
        else:
            self.mean = self.mean.plus(now.plus(self.mean, -1.0), 1 / self.averaged)

    def final(self) -> Natural:
        """Return the last approximation, or the average."""
        if self.mean is None:
            return self.q
        second = self.mean.second
        first = {
            n: second[n] * m if second[n].dim() == m.dim() else (second[n] @ m[..., None])[..., 0]
            for n, m in self.mean.first.items()
        }
        return Natural(first, second)

    def posterior(self, **record: Any) -> Posterior:
        """Return the Gaussian posterior, which predicts by propagating moments."""
        return self.moments.posterior(self.final(), **record)

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on from here, as tensors."""
        found = {f"model.{n}": v for n, v in self.moments.state().items()}
        parts = {"q": self.q, "mean": self.mean}
        for kind, natural in parts.items():
            if natural is not None:
                found |= {f"{kind}.first.{n}": v for n, v in natural.first.items()}
                found |= {f"{kind}.second.{n}": v for n, v in natural.second.items()}
        found |= {f"velocity.{n}": v for n, v in self.velocity.items()}
        found["counts"] = torch.tensor([self.steps, self.averaged])
        return {name: value.detach().clone().contiguous() for name, value in found.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        parts = {
            kind: {n[len(kind) + 1 :]: v.clone() for n, v in state.items() if n.startswith(kind)}
            for kind in ("model", "q.first", "q.second", "mean.first", "mean.second", "velocity")
        }
        self.moments.restore(parts["model"])
        self.q = Natural(parts["q.first"], parts["q.second"])
        if parts["mean.first"]:
            self.mean = Natural(parts["mean.first"], parts["mean.second"])
        self.velocity = parts["velocity"]
        self.steps, self.averaged = (int(v) for v in state["counts"])
        self._prepare()


def _on(natural: Natural, device: torch.device) -> Natural:
    return Natural(
        {n: v.to(device) for n, v in natural.first.items()},
        {n: v.to(device) for n, v in natural.second.items()},
    )
