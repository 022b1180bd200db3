"""Moments: Bayesian linear and logistic regression from noised second moments and scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpbnn.contributions.dense import ChunkedContributions, DenseContributions, UnsupportedModel
from dpbnn.likelihoods import Categorical, HeteroscedasticGaussian
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import State
from dpbnn.moments import noisy, noisy_posterior
from dpbnn.moments.coordinates import packed, unpacked
from dpbnn.networks import LearnedNoise
from dpbnn.posteriors import DrawnPosterior
from dpbnn.priors import Gaussian
from dpbnn.privacy.checks import check_count, check_positive

if TYPE_CHECKING:
    from dpbnn.posteriors import Posterior
    from dpbnn.privacy.plan import Plan

__all__ = ["Moments"]

_SHARES = {"second": 0.5, "score": 0.4, "square": 0.1}  # of the squared sensitivity
_RESIDUALS = 3.0  # standard deviations at which later residuals are cut off
_MISFIT = 0.05  # error of the model of a score, as a share of it
_CHUNK = 2**23  # numbers of contributions at once
_LARGE = 25  # coefficients, from which on fewer chains give the draws


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moments(Method):
    """Bayesian linear or logistic regression that models the noise of what was released.

    The network is linear in fixed features: a Linear layer, after layers that are frozen or have no
    parameters. With u = (1, features) and the public coefficients theta_t of a stage, record i
    contributes

        w_i (a u u',  b r u,  c r^2),   w_i = min(1, R^2/|u|^2)

    where r = y - u' theta_t, cut off at B_t, or r = y - sigmoid(u' theta_t) in logistic regression,
    which has B_t = 1 and no c. Public scales make (a R^2)^2 + (b R B_t)^2 + (c B_t^2)^2 = 1, and
    off-diagonal entries of u u' are there once, times sqrt(2). So no contribution is longer than
    1, which is the clip: nothing is clipped beyond w and B_t, and w, which depends on the features
    alone, does not bias the coefficients.

    After each stage theta_t moves to the mode of the posterior given all releases so far. In the
    end the posterior of the second moments, coefficients and noise is sampled; see
    `dpbnn.moments.noisy`. Without privacy it is the exact conjugate posterior (linear regression)
    or Laplace's approximation at the last step (logistic regression; give it ten steps or so).

    Releases are sums over all records: the plan needs `sampling="full-batch"`. A plan of more steps
    than stages averages the releases of a stage, which costs and gains nothing.

    Attributes:
        clip: R, the norm of u beyond which a record is weighted down; None is the root of the
            number of coefficients, which suits features of variance 1 or below.
        target_bound: B_1, beyond which targets of a regression are cut off.
        stages: number of points at which scores are taken.
        draws: number of posterior draws.
    """

    clip: float | None = None
    target_bound: float = 3.0
    stages: int = 3
    draws: int = 512

    name = "moments"
    noise_aware = True

    def __post_init__(self) -> None:
        check_positive(clip=1.0 if self.clip is None else self.clip, target_bound=self.target_bound)
        check_count(stages=self.stages, draws=self.draws)

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip, which is 1 in scaled coordinates."""
        if plan.sampling != "full-batch":
            raise ValueError(
                f"sampling={plan.sampling!r}: Moments sums over all records; give a plan with "
                f"sampling='full-batch', such as steps={self.stages}"
            )
        return plan, 1.0 if plan.private else math.inf

    def start(self, problem: Problem) -> MomentsProcess:
        """Return the process that trains on a problem."""
        return MomentsProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MomentsState(State):
    """State of `Moments`; the network itself stays as it was.

    Attributes:
        sums: of the releases of a stage, by released name, stages first.
        variances: of their noise in units of the clip, summed over a stage's steps, [stages].
        counts: steps of a stage, [stages].
        at: theta_t, [stages, coefficients].
        bounds: B_t, [stages].
    """

    sums: dict[str, Tensor]
    variances: Tensor
    counts: Tensor
    at: Tensor
    bounds: Tensor


class MomentsProcess(Process[MomentsState]):
    """Equations of `Moments`."""

    def __init__(self, settings: Moments, problem: Problem) -> None:
        super().__init__(problem)
        self.settings = settings
        self.layers, self.path, self.head = _parts(problem.model)
        self.logistic, self.noise, self.learned = _family(problem)
        prior = problem.prior
        if not isinstance(prior, Gaussian):
            raise ValueError(f"prior={prior}: Moments needs a Gaussian one, as dpbnn.Gaussian(1.0)")
        self.size = self.head.in_features + 1
        self.stages = min(settings.stages, problem.steps) if problem.private else problem.steps
        # The log odds of two classes are a difference of two outputs.
        spread = prior.std * (math.sqrt(2) if self.logistic else 1.0)
        centre = 0.0 if self.logistic else prior.mean
        std = torch.full((self.size,), spread, dtype=torch.float64)
        mean = torch.full((self.size,), centre, dtype=torch.float64)
        if self.head.bias is None:
            std[0], mean[0] = 1e-6, 0.0
        self.family = noisy.Model(
            size=self.size,
            n=problem.n,
            logistic=self.logistic,
            mean=mean,
            std=std,
            noise=self.noise,
            scale=settings.target_bound / 6,
        )

    @property
    def radius(self) -> float:
        """R."""
        return math.sqrt(self.size) if self.settings.clip is None else self.settings.clip

    def begin(self) -> MomentsState:
        """Return the state before the first step."""
        shapes = self._shapes()
        first = 1.0 if self.logistic else self.settings.target_bound
        zeros = torch.zeros(self.stages, dtype=torch.float64)
        return MomentsState(
            sums={n: torch.zeros(self.stages, *s, dtype=torch.float64) for n, s in shapes.items()},
            variances=zeros,
            counts=zeros.clone(),
            at=torch.zeros(self.stages, self.size, dtype=torch.float64),
            bounds=torch.full((self.stages,), first, dtype=torch.float64),
        )

    def stage(self, steps: int) -> int:
        """Return the stage of a step."""
        return steps * self.stages // self.problem.steps

    def scales(self, bound: float) -> dict[str, float]:
        """Return a, b and c; all are 1 without privacy."""
        if not self.problem.private:
            return dict.fromkeys(self._shapes(), 1.0)
        total = sum(_SHARES[name] for name in self._shapes())
        radius = self.radius
        largest = {"second": radius**2, "score": radius * bound, "square": bound**2}
        return {n: math.sqrt(_SHARES[n] / total) / largest[n] for n in self._shapes()}

    def contribute(self, state: MomentsState, x: Any, y: Tensor) -> ChunkedContributions:
        """Return every record's second moments, score and squared residual, all scaled."""
        now = self.stage(state.steps)
        theta, bound = state.at[now], float(state.bounds[now])

        def part(first: int, last: int) -> DenseContributions:
            u = self.features(x[first:last])
            return DenseContributions(self.statistics(u, y[first:last], theta.to(u), bound))

        shapes = self._shapes()
        size = self.problem.microbatch_size or _CHUNK // sum(s.numel() for s in shapes.values())
        device = self.head.weight.device
        return ChunkedContributions(part, len(x), size, shapes, device, torch.float64)

    def features(self, x: Tensor) -> Tensor:
        """Return u = (1, features) of every record, each computed from its record alone."""

        def single(row: Tensor) -> Tensor:
            row = row.unsqueeze(0)
            for layer in self.layers:
                row = layer(row)
            return row.squeeze(0)

        with torch.no_grad():
            if self.layers and len(x):
                x = torch.func.vmap(single)(x)
            found = x.double().reshape(len(x), self.size - 1)
            return torch.cat([found.new_ones(len(x), 1), found], 1)

    def statistics(self, u: Tensor, y: Tensor, theta: Tensor, bound: float) -> dict[str, Tensor]:
        """Return the contributions of records by released name; none is longer than 1."""
        predicted = u @ theta
        outer = u.unsqueeze(-1) * u.unsqueeze(-2)
        weight = u.new_ones(len(u))
        if self.logistic:
            p = torch.sigmoid(predicted)
            residual = y.to(u).reshape(len(u)) - p
            if not self.problem.private:
                outer = (p * (1 - p))[:, None, None] * outer
        else:
            residual = y.to(u).reshape(len(u)) - predicted
        if self.problem.private:
            residual = residual.clamp(-bound, bound)
            weight = (self.radius**2 / u.square().sum(1)).clamp(max=1.0)
        values = {"second": packed(outer), "score": residual.unsqueeze(1) * u}
        values["square"] = residual.square().unsqueeze(1)
        scales = self.scales(bound)
        return {n: (scale * weight).unsqueeze(1) * values[n] for n, scale in scales.items()}

    def update(self, state: MomentsState, release: Mapping[str, Tensor]) -> MomentsState:
        """Add the release to its stage's; the last of a stage moves theta_t."""
        now, steps = self.stage(state.steps), state.steps + 1
        scales = self.scales(float(state.bounds[now]))
        for name, total in state.sums.items():
            total[now] += release[name].double().cpu() / (scales[name] * self.problem.n)
        if self.problem.private:
            state.variances[now] += self.problem.sigmas[state.steps] ** 2
        state.counts[now] += 1
        state = dataclasses.replace(state, steps=steps)
        if steps < self.problem.steps and self.stage(steps) > now:
            with torch.no_grad():
                state.at[now + 1], state.bounds[now + 1] = self._next(state, now)
        return state

    def _next(self, state: MomentsState, now: int) -> tuple[Tensor, float]:
        """Return the coefficients and the bound of residuals of the next stage."""
        bound = float(state.bounds[now])
        if not self.problem.private:
            return (self._newton(state, now)[0] if self.logistic else state.at[now]), bound
        data = self._released(state, now + 1)
        q = noisy_posterior.mode(self.family, data)
        second, theta, log_noise = self.family.parts(q)
        if self.logistic:
            return theta[0], bound
        spread = noisy_posterior.covariance(self.family, q, data)
        variance = (2 * log_noise).exp() + (spread * second).sum((-1, -2))
        return theta[0], min(bound, _RESIDUALS * float(variance.sqrt()))

    def _released(self, state: MomentsState, stages: int) -> noisy.Released:
        """Return what the first stages have released, with the noise that it has."""
        counts, variances = state.counts[:stages], state.variances[:stages]
        scales = [self.scales(float(bound)) for bound in state.bounds[:stages]]
        std = {
            name: variances.sqrt()
            / counts
            / torch.tensor([scale[name] for scale in scales], dtype=torch.float64)
            / self.problem.n
            for name in self._shapes()
        }
        mean = {n: total[:stages] / counts.unsqueeze(1) for n, total in state.sums.items()}
        weights = std["second"].square().reciprocal()
        second = (weights.unsqueeze(1) * mean["second"]).sum(0) / weights.sum()
        none = torch.ones(stages, dtype=torch.float64)
        square, square_std = none, none
        if self.learned:
            square = mean["square"].squeeze(1)
            beyond = _MISFIT * (square - square[-1])
            square_std = (std["square"].square() + beyond.square()).sqrt()
        # The model of a score is exact close to theta_t alone: far ones are trusted less.
        noise = std["score"].square()
        far = (mean["score"].square().mean(1) - noise).clamp(min=0.0)
        parts = noisy.Released(
            second=second,
            second_std=weights.sum().rsqrt(),
            score=mean["score"],
            score_std=(noise + _MISFIT**2 * far).sqrt(),
            at=state.at[:stages],
            square=square,
            square_std=square_std,
            bound=state.bounds[:stages],
        )
        return noisy.Released(*(part.unsqueeze(0) for part in parts))

    def _newton(self, state: MomentsState, now: int) -> tuple[Tensor, Tensor]:
        """Return the next coefficients of a logistic regression without privacy, and J."""
        n, prior = self.problem.n, self.family.std.square().reciprocal()
        precision = n * unpacked(state.sums["second"][now], self.size) + torch.diag(prior)
        gradient = n * state.sums["score"][now] - prior * (state.at[now] - self.family.mean)
        move = torch.linalg.solve(precision, gradient)
        reach = 2 * self.family.std
        move = move * (reach / move.abs().clamp(min=1e-300)).min().clamp(max=1.0)
        return state.at[now] + move, precision

    def draws(self, state: MomentsState) -> tuple[Tensor, Tensor]:
        """Return posterior draws of the coefficients and of log s."""
        count, last = self.settings.draws, self.stages - 1
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        if self.problem.private:
            keep = 4 if self.size < _LARGE else 8
            chains = -(-count // keep)
            found = noisy_posterior.sample(
                self.family, self._released(state, self.stages), generator, chains=chains, keep=keep
            )
            return found[0][0, :count], found[1][0, :count]
        if self.logistic:
            mean, precision = self._newton(state, last)
            normal = torch.randn(self.size, count, dtype=torch.float64, generator=generator)
            root = torch.linalg.cholesky(precision)
            moved = torch.linalg.solve_triangular(root.mT, normal, upper=True)
            return mean + moved.mT, torch.zeros(count, dtype=torch.float64)
        return noisy_posterior.exact(
            self.family,
            unpacked(state.sums["second"][last], self.size),
            state.sums["score"][last],
            float(state.sums["square"][last]) if self.learned else 0.0,
            generator,
            count,
        )

    def posterior(self, state: MomentsState, **record: Any) -> Posterior:
        """Return draws of the last layer's weights, and of the noise where it is learned."""
        with torch.no_grad():
            theta, log_noise = self.draws(state)
            if self.logistic:
                prior = self.problem.prior
                assert isinstance(prior, Gaussian)
                # The mean of the two outputs is no part of the likelihood.
                other = prior.mean + prior.std / math.sqrt(2) * torch.randn(theta.shape).to(theta)
                rows = torch.stack([other - theta / 2, other + theta / 2], 1)
            else:
                rows = theta.unsqueeze(1)
            drawn = {f"{self.path}weight": rows[..., 1:]}
            if self.head.bias is not None:
                drawn[f"{self.path}bias"] = rows[..., 0]
            if self.learned:
                drawn["1.log_variance"] = 2 * log_noise.unsqueeze(1)
            like = self.problem.trainable()
            drawn = {n: v.to(like[n]).contiguous() for n, v in drawn.items()}
            model = self.problem.rebuilt({n: v.mean(0) for n, v in drawn.items()})
        return DrawnPosterior(model, self.problem.likelihood, drawn, **record)

    def _shapes(self) -> dict[str, torch.Size]:
        shapes = {
            "second": torch.Size([self.size * (self.size + 1) // 2]),
            "score": torch.Size([self.size]),
        }
        return {**shapes, "square": torch.Size([1])} if self.learned else shapes


def _family(problem: Problem) -> tuple[bool, float | None, bool]:
    """Return whether the regression is logistic, its noise if known, and if it is learned."""
    likelihood, outputs = problem.likelihood, _parts(problem.model)[2].out_features
    if isinstance(likelihood, Categorical):
        if likelihood.weights is not None:
            raise ValueError("weights: Moments has no class weights; use SGD or SGLD, say")
        if outputs != 2:
            raise ValueError(
                f"the network has {outputs} outputs: Moments classifies two classes; use SGLD, say"
            )
        return True, None, False
    if not isinstance(likelihood, GaussianNoise | HeteroscedasticGaussian):
        raise ValueError(
            f"likelihood={likelihood}: Moments needs 'gaussian', or 'categorical' with two classes"
        )
    if outputs != 1:
        raise ValueError(f"the network has {outputs} outputs: Moments predicts one number")
    if isinstance(likelihood, GaussianNoise):
        return False, likelihood.noise_std, False
    if not isinstance(problem.model, nn.Sequential) or not isinstance(
        problem.model[-1], LearnedNoise
    ):
        raise ValueError(
            "likelihood='heteroscedastic': Moments has one noise for all records; use "
            "likelihoods.Gaussian(None)"
        )
    return False, None, True


def _parts(model: nn.Module) -> tuple[list[nn.Module], str, nn.Linear]:
    """Return the fixed layers, the last one's path with a point, and the last layer."""
    found = _flat(model, "")
    if isinstance(found[-1][1], LearnedNoise):
        found = found[:-1]
    *layers, (path, head) = found
    if type(head) is not nn.Linear or not all(p.requires_grad for p in head.parameters()):
        raise UnsupportedModel(
            "Moments needs a network that ends in a Linear layer which is not frozen; in "
            "estimators pass hidden=()"
        )
    for where, layer in layers:
        if any(p.requires_grad for p in layer.parameters()):
            raise UnsupportedModel(
                f"{where.rstrip('.')!r} has trainable parameters, and Moments moves the last layer "
                f"alone; freeze it with requires_grad_(False), or pass hidden=() in estimators"
            )
        if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p for m in layer.modules()):
            raise UnsupportedModel(f"{where.rstrip('.')!r} drops features at random; leave it out")
    return [layer for _, layer in layers], path, head


def _flat(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    if type(module) is not nn.Sequential:
        return [(path, module)]
    return [
        part for name, child in module.named_children() for part in _flat(child, f"{path}{name}.")
    ]
