"""DP-EM: mixtures of Gaussians from clipped and noised expected sufficient statistics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from dpbnn.contributions.dense import ChunkedContributions, DenseContributions
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import Average, State
from dpbnn.mixtures import GaussianMixture, whitened
from dpbnn.moments.coordinates import packed, unpacked
from dpbnn.posteriors import MixturePosterior, Posterior
from dpbnn.priors import Flat, Gaussian
from dpbnn.privacy.checks import check_numbers, check_positive
from dpbnn.privacy.plan import Plan

__all__ = ["EM"]

_CHUNK = 2**22  # numbers in a chunk of contributions
_FEWEST = 1e-3  # smallest weight of a component, as a share of 1/J


@dataclasses.dataclass(frozen=True, kw_only=True)
class EM(Method):
    """Expectation maximisation for a `GaussianMixture`; under a private plan it is DP-EM.

    With the responsibilities r_j of a point x and z_j = L_j^-1 (x - a_j), the point contributes

        (r_j, r_j z_j) for all components j, and r_j (z_j z_j^T - I) where covariances are learned.

    The reference is the current component, a_j = m_j and L_j L_j^T = S_j, which is public, so
    typical contributions are small; the sensitivity is the clip. Uncentred statistics have a_j = 0,
    L_j = bound I and no I to subtract; then |r| <= 1 and |z| <= 1 give the global sensitivity
    sqrt(2), or sqrt(3) with covariances, and nothing is clipped beyond the bound.

    The M step sees sums N_j, N_j mean, N_j scatter times n/b, and nothing else:

        P_j = I/std^2 + N_j S_j^-1,  m_j <- P_j^-1 (centre_j/std^2 + S_j^-1 sum_i r_ij x_i)
        S_j <- (strength s^2 I + scatter about m_j) / (strength + N_j),  w_j <- N_j / sum N

    which are maxima a posteriori under the prior of the means and an inverse-Wishart one of the
    covariances. The posterior of a mean is N(m_j, P_j^-1), given the responsibilities; what the
    noise adds to its uncertainty is not in it.

    Attributes:
        clip: C, of the whole contribution; None with uncentred statistics is their sensitivity.
        bound: public radius; points beyond it are moved onto the sphere, and means stay inside.
        centred: whether statistics are taken about the current components.
        weights: whether weights are learned.
        covariances: whether covariances within components are learned.
        strength: pseudo-counts of the inverse-Wishart prior, which is centred on s^2 I.
        variances: range in which eigenvalues of learned covariances are kept, as multiples of s^2.
        least: smallest count of a component, as a share of what its weight was (and at least a
            thousandth of n/J). Where noise or an empty component makes it smaller, the rest counts
            as points that the component has already.
        anneal: inverse temperature of the first responsibilities; it rises to 1 over the first
            half of the steps. Below 1 it makes the result depend less on the start.
        step: share of the way to the maximum that a step goes; below 1 for small batches.
        average: whether the result is the mean over the second half of the steps.
    """

    clip: float | None = 2.0
    bound: float | None = None
    centred: bool = True
    weights: bool = False
    covariances: bool = False
    strength: float = 1.0
    variances: tuple[float, float] = (0.1, 100.0)
    least: float = 0.5
    anneal: float = 1.0
    step: float = 1.0
    average: bool = False

    name = "em"

    def __post_init__(self) -> None:
        if self.clip is not None:
            check_positive(clip=self.clip)
        elif self.centred:
            raise ValueError(
                "clip=None: centred statistics have no sensitivity of their own; give a clip, or "
                "centred=False and a bound"
            )
        if self.bound is not None:
            check_positive(bound=self.bound)
        elif not self.centred:
            raise ValueError("bound=None: uncentred statistics need a public bound on |x|")
        check_positive(strength=self.strength)
        for field in ("least", "anneal", "step"):
            check_numbers(**{field: getattr(self, field)})
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)}: must lie in (0, 1]")
        low, high = self.variances if len(self.variances) == 2 else (0.0, 0.0)
        if not 0 < low <= 1 <= high < math.inf:
            raise ValueError(f"variances={self.variances}: must be (low, high), low <= 1 <= high")

    @classmethod
    def paper(cls, bound: float, **changes: Any) -> Self:
        """Return DP-EM (Park et al. 2017): uncentred statistics, weights and covariances learned.

        The sensitivity is the global one. The authors' code scales the data by its own maximum and
        divides the sensitivity by the number of points that a component has, both of which depend
        on the data.
        """
        return cls(
            **{
                "bound": bound, "clip": None, "centred": False,
                "weights": True, "covariances": True, **changes,
            }
        )  # fmt: skip

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip."""
        if not plan.private:
            return plan, math.inf
        return plan, math.sqrt(2 + self.covariances) if self.clip is None else self.clip

    def start(self, problem: Problem) -> EMProcess:
        """Return the process that trains on a problem."""
        if not isinstance(problem.model, GaussianMixture):
            raise ValueError(
                f"method=EM: needs a dpbnn.GaussianMixture, the model is a "
                f"{type(problem.model).__name__}"
            )
        if not isinstance(problem.prior, Gaussian | Flat):
            raise ValueError(f"prior={problem.prior}: must be dpbnn.Gaussian or dpbnn.Flat for EM")
        problem.refuse_frozen("EM")
        return EMProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EMState(State):
    """State of `EM`; means, weights and covariances are the mixture's own tensors.

    Attributes:
        counts: N_j.
        average: of means, weights, covariances and counts.
    """

    counts: Tensor
    average: Average = dataclasses.field(default_factory=Average)


class EMProcess(Process[EMState]):
    """Equations of `EM`."""

    model: GaussianMixture

    def __init__(self, settings: EM, problem: Problem) -> None:
        super().__init__(problem)
        self.settings = settings

    def begin(self) -> EMState:
        """Return the state before the first step."""
        names = ("offsets", "log_weights", "covariances")
        parameters = {name: getattr(self.model, name) for name in names}
        return EMState(parameters=parameters, counts=self.problem.n * self.model.weights)

    def contribute(self, state: EMState, x: Tensor, y: Tensor) -> ChunkedContributions:
        """Return every point's expected sufficient statistics; `y` is not used."""
        model = self.model
        shapes = {"count": model.means.shape[:1], "mean": model.means.shape}
        if self.settings.covariances:
            numbers = model.dimensions * (model.dimensions + 1) // 2
            shapes["scatter"] = torch.Size([model.components, numbers])

        def part(first: int, last: int) -> DenseContributions:
            return DenseContributions(self.statistics(state, x[first:last]))

        size = self.problem.microbatch_size or _CHUNK // sum(s.numel() for s in shapes.values())
        return ChunkedContributions(part, len(x), size, shapes, x.device, torch.float64)

    def statistics(self, state: EMState, x: Tensor) -> dict[str, Tensor]:
        """Return (r, r z, r (z z^T - I)) of every point, by released name."""
        with torch.no_grad():
            x = self._bounded(x.to(self.model.means))
            r = (self._inverse_temperature(state) * self.model(x)).softmax(-1)
            z = whitened(x, *self._reference())
            values = {"count": r, "mean": r.unsqueeze(-1) * z}
            if self.settings.covariances:
                outer = z.unsqueeze(-1) * z.unsqueeze(-2) - self._subtracted()
                values["scatter"] = r.unsqueeze(-1) * packed(outer)
        return values

    def update(self, state: EMState, release: Mapping[str, Tensor]) -> EMState:
        """Take the M step."""
        model, settings = self.model, self.settings
        with torch.no_grad():
            scale = self.problem.n / self.problem.batch_size
            sums = {name: scale * value.to(model.means) for name, value in release.items()}
            least = (settings.least * model.weights).clamp(min=_FEWEST / model.components)
            counts = torch.maximum(sums["count"], self.problem.n * least).clamp(max=self.problem.n)
            missing = counts - sums["count"]
            origin, root = self._reference()
            here = _solved(root, model.means - origin)
            first = sums["mean"] + missing.unsqueeze(-1) * here
            precision = self._precision(counts)
            means = self._mode(precision, counts, origin, root, first)
            found = {"means": means, "counts": counts, "weights": model.weights}
            found["covariances"] = model.covariances
            if settings.weights:
                found["weights"] = counts / counts.sum()
            if settings.covariances:
                second = unpacked(sums["scatter"], model.dimensions)
                second = second + sums["count"][:, None, None] * self._subtracted()
                half = torch.linalg.solve_triangular(root, model.covariances, upper=False)
                inside = torch.linalg.solve_triangular(root, half.mT, upper=False)
                stay = here.unsqueeze(-1) * here.unsqueeze(-2) + inside
                second = second + missing[:, None, None] * stay
                away = _solved(root, means - origin)
                found["covariances"] = self._covariances(root, counts, first, second, away)
            now = self._values(state)
            moved = {name: torch.lerp(now[name], v, settings.step) for name, v in found.items()}
            model.offsets.copy_(moved["means"] - model.centres)
            model.log_weights.copy_(moved["weights"].log())
            model.covariances.copy_(moved["covariances"])
        state = dataclasses.replace(state, steps=state.steps + 1, counts=moved["counts"])
        if not settings.average:
            return state
        values, total = self._values(state), self.problem.steps
        return dataclasses.replace(state, average=state.average.add(values, state.steps, total))

    def posterior(self, state: EMState, **record: Any) -> Posterior:
        """Return the mixture with Gaussian means."""
        model = self.problem.rebuilt({})
        assert isinstance(model, GaussianMixture)
        values = {**self._values(state), **state.average.values}
        with torch.no_grad():
            model.offsets.copy_(values["means"] - model.centres)
            model.log_weights.copy_(values["weights"].log())
            model.covariances.copy_(values["covariances"])
        precision = self._precision(values["counts"], values["covariances"])
        spread = {"covariance": torch.cholesky_inverse(torch.linalg.cholesky(precision))}
        return MixturePosterior(model, self.problem.likelihood, spread, **record)

    def _bounded(self, x: Tensor) -> Tensor:
        bound = self.settings.bound
        if bound is None:
            return x
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * (bound / norms).clamp(max=1)

    def _inverse_temperature(self, state: EMState) -> float:
        done = min(1.0, 2 * state.steps / max(1, self.problem.steps))
        return self.settings.anneal ** (1 - done)

    def _reference(self) -> tuple[Tensor, Tensor]:
        """Return a_j and L_j."""
        if self.settings.centred:
            return self.model.means, torch.linalg.cholesky(self.model.covariances)
        eye = torch.eye(self.model.dimensions).to(self.model.means)
        return torch.zeros_like(self.model.means), self.settings.bound * eye.expand_as(
            self.model.covariances
        )

    def _subtracted(self) -> Tensor:
        eye = torch.eye(self.model.dimensions).to(self.model.means)
        return eye if self.settings.centred else torch.zeros_like(eye)

    def _precision(self, counts: Tensor, covariances: Tensor | None = None) -> Tensor:
        """Return P_j = I/std^2 + N_j S_j^-1."""
        covariances = self.model.covariances if covariances is None else covariances
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariances))
        eye = torch.eye(self.model.dimensions).to(inverse)
        return self._prior_precision() * eye + counts[:, None, None] * inverse

    def _prior_precision(self) -> float:
        prior = self.problem.prior
        return prior.std**-2 if isinstance(prior, Gaussian) else 0.0

    def _mode(
        self, precision: Tensor, counts: Tensor, origin: Tensor, root: Tensor, first: Tensor
    ) -> Tensor:
        """Return P_j^-1 (centre_j/std^2 + S_j^-1 sum_i r_ij x_i), inside the bound."""
        sums = counts.unsqueeze(-1) * origin + (root @ first.unsqueeze(-1)).squeeze(-1)
        inner = torch.linalg.cholesky(self.model.covariances)
        natural = torch.cholesky_solve(sums.unsqueeze(-1), inner)
        if isinstance(self.problem.prior, Gaussian):
            centres = self.model.centres + self.problem.prior.mean
            natural = natural + self._prior_precision() * centres.unsqueeze(-1)
        solved = torch.cholesky_solve(natural, torch.linalg.cholesky(precision))
        return self._bounded(solved.squeeze(-1))

    def _covariances(
        self, root: Tensor, counts: Tensor, first: Tensor, second: Tensor, away: Tensor
    ) -> Tensor:
        """Return (strength s^2 I + scatter about the new means) / (strength + N), kept in range."""
        crossed = first.unsqueeze(-1) * away.unsqueeze(-2)
        moved = counts[:, None, None] * away.unsqueeze(-1) * away.unsqueeze(-2)
        scatter = root @ (second - crossed - crossed.mT + moved) @ root.mT
        noise, strength = self.model.noise_std**2, self.settings.strength
        eye = torch.eye(self.model.dimensions).to(scatter)
        mode = (strength * noise * eye + scatter) / (strength + counts)[:, None, None]
        values, axes = torch.linalg.eigh(mode)
        low, high = self.settings.variances
        kept = values.clamp(low * noise, high * noise)
        return (axes * kept.unsqueeze(-2)) @ axes.mT

    def _values(self, state: EMState) -> dict[str, Tensor]:
        model = self.model
        return {
            "means": model.means.detach(),
            "weights": model.weights,
            "covariances": model.covariances,
            "counts": state.counts,
        }


def _solved(root: Tensor, vectors: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(root, vectors.unsqueeze(-1), upper=False).squeeze(-1)
