"""Noise-aware inference: chains that sample the weights given what the gate released."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from dpbnn.contributions.dense import Contributions, DenseContributions, UnsupportedModel
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import State
from dpbnn.methods.surrogate import Surrogate, annealed_chains, clipped_scores, with_moments
from dpbnn.posteriors import IteratePosterior, Posterior
from dpbnn.posteriors.evaluate import places
from dpbnn.priors import Gaussian
from dpbnn.privacy.checks import check_count, check_positive
from dpbnn.privacy.plan import Plan

LARGEST = 2000  # weights, as matrices of their square are kept
_JITTER = 1e-2  # of the mean variance, added to all, so that no direction is taken for exact
_MEANS, _SECOND = 0.3, 0.15  # std of inputs' means and second moments about those of uniform ones
_STEP, _FAR = 0.5, 3.0  # share of the way to the linearised mean; most change of an output, rms


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseAware(Method):
    """Bayesian inference of the weights from the noised sum of clipped scores.

    The run has rounds. In round r the gate releases the clipped gradients at public weights w_r,

        g_r = sum_i clip(grad nll_i(w_r)) + noise.

    If the data come from weights w, the releases, averaged with weights a_r, are Gaussian with

        mean        n E_x sum_y p_w(y | x) t(x, y),    t(x, y) = sum_r a_r clip(grad nll(x, y; w_r))
        covariance  V + s^2 I,

    V of the sample and s^2 of the privacy noise, both known. The clip and the noise are part of the
    model: the posterior given the release is no more certain than the release allows. After each
    round w_r moves to the posterior mean of the linearised network. At the end
    Hamiltonian Monte Carlo samples the posterior under the true prior; that costs no privacy.

    Inputs x are drawn in [-1, 1], the range that the estimators scale to, with the means and
    covariances of the data: the first steps release those. There an example contributes
    C (x / sqrt(d), x x' / d) / sqrt(2), of norm at most C. Later it contributes its gradient. So
    the sensitivity is the clip. What is released of the moments is shrunk to those of uniform
    inputs, as far as the noise demands.

    It is for classes, a Gaussian prior and at most 2000 weights.

    Reference: Wood, Statistical inference for noisy nonlinear ecological dynamic systems, 2010
    (synthetic likelihood); Bernstein and Sheldon, Differentially private Bayesian inference for
    exponential families, 2018 (noise-aware posteriors).

    Attributes:
        clip: C, largest norm of one record's gradient.
        rounds: how often the point moves at which gradients are taken.
        points: number of public inputs.
        share: of the steps, for means and covariances of the inputs.
        inputs: function of a number that returns so many public inputs, distributed as the data
            are believed to be; then no step is spent on moments. Never pass rows of the data: the
            guarantee does not cover what this returns, and the statement says so.
        chains: number of chains.
        iterations: of every chain.
        keep: draws stored of every chain.
        leaps: leapfrog steps of an iteration.
        folder: where draws are written; a temporary folder by default.
    """

    clip: float = 3.0
    rounds: int = 10
    points: int = 512
    share: float = 0.1
    inputs: Callable[[int], Tensor] | None = None
    chains: int = 12
    iterations: int = 80
    keep: int = 25
    leaps: int = 5
    folder: str | None = None

    name = "noiseaware"
    noise_aware = True

    def __post_init__(self) -> None:
        check_positive(clip=self.clip, share=self.share)
        if self.share > 0.5:
            raise ValueError(f"share={self.share}: must lie in (0, 0.5]; try 0.1")
        counts = {"rounds": self.rounds, "points": self.points, "chains": self.chains}
        check_count(**counts, iterations=self.iterations, keep=self.keep, leaps=self.leaps)
        if self.keep >= self.iterations:
            raise ValueError(
                f"keep={self.keep}: must be below iterations={self.iterations}; the first ones of "
                f"a chain are no draws from the posterior"
            )

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip."""
        if len(plan.noise_multipliers) > 1:
            raise ValueError(
                "plan: its noise changes from step to step, and NoiseAware models one noise; plan "
                "without a schedule"
            )
        return plan, self.clip if plan.private else math.inf

    def start(self, problem: Problem) -> NoiseAwareProcess:
        """Return the process that trains on a problem."""
        if getattr(problem.likelihood, "weights", None) is not None:
            raise ValueError("weights: NoiseAware has no class weights; use SGD or SGLD, say")
        if not isinstance(problem.likelihood, Categorical):
            raise ValueError(
                f"likelihood={type(problem.likelihood).__name__}: NoiseAware is for classes; use "
                f"VI or SGLD"
            )
        if not isinstance(problem.prior, Gaussian):
            raise ValueError(
                f"prior={problem.prior}: NoiseAware needs a Gaussian one; pass "
                f"prior=dpbnn.Gaussian(1.0), or use SGLD"
            )
        size = sum(p.numel() for p in problem.trainable().values())
        if size > LARGEST:
            raise UnsupportedModel(
                f"the network has {size} weights, and NoiseAware keeps matrices of their square; "
                f"use at most {LARGEST} (fewer hidden units, or freeze all but the last layers), "
                f"or use VI"
            )
        return NoiseAwareProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseAwareState(State):
    """State of `NoiseAware`; weights are standardised by the prior, (w - mean) / std.

    Attributes:
        inputs: the public inputs.
        moments: sum of the released moments of the data's inputs; empty where there are none.
        anchor: weights of the start, the prior mean of the linearised network.
        round: sum of the releases of this round.
        release: weighted sum of the releases of all rounds.
        features: likewise, what an input and an outcome add to it, [inputs * outcomes, P].
        slope: likewise, the derivative of its mean by the weights, [P, P].
        centre: likewise, slope times weights minus release, [P].
        spread: likewise, its covariance without the privacy noise, [P, P].
        covariance: of the weights, after the last round, [P, P].
        weight: sum of the rounds' weights.
        squares: sum over steps of squared weights.
        seed: of the chains.
    """

    inputs: Tensor
    moments: Tensor
    anchor: Tensor
    round: Tensor
    release: Tensor
    features: Tensor
    slope: Tensor
    centre: Tensor
    spread: Tensor
    covariance: Tensor
    weight: float = 0.0
    squares: float = 0.0
    seed: int = 0


class NoiseAwareProcess(Process[NoiseAwareState]):
    """Equations of `NoiseAware`."""

    def __init__(self, settings: NoiseAware, problem: Problem) -> None:
        super().__init__(problem, problem.attach())
        assert isinstance(problem.prior, Gaussian)
        self.settings, self.prior = settings, problem.prior
        self.public = copy.deepcopy(problem.origin).requires_grad_(False).eval()
        self.places = places(self.public)
        self.shapes = {name: p.shape for name, p in problem.trainable().items()}
        spent = settings.inputs is None and problem.steps > 1
        self.first = max(1, round(settings.share * problem.steps)) if spent else 0
        self.rounds = min(settings.rounds, problem.steps - self.first)

    def begin(self) -> NoiseAwareState:
        """Return the state before the first step: a prior draw whose last layer is the mean."""
        parameters = self.problem.trainable()
        first = next(iter(parameters.values()))
        anchor = {name: torch.randn_like(p) for name, p in parameters.items()}
        for name in _last_layer(self.public):
            if name in anchor:
                anchor[name].zero_()
        flat = self._flat(anchor)
        inputs = self._given_inputs(first)
        moments = _moments(inputs.flatten(1)[:1]).sum(0) * 0 if self.first else flat[:0]
        self._place(parameters, flat)
        outputs = self._outputs(flat, inputs)
        if outputs.dim() != 2:
            raise UnsupportedModel(
                f"the network's outputs have shape {list(outputs.shape)}; NoiseAware takes one row "
                f"of logits per example"
            )
        size = len(flat)
        empty = torch.zeros(size, dtype=torch.float64, device=first.device)
        square = torch.zeros(size, size, dtype=torch.float64, device=first.device)
        return NoiseAwareState(
            parameters=parameters, inputs=inputs, moments=moments.double(), anchor=flat,
            round=empty, release=empty.clone(),
            features=flat.new_zeros(outputs.numel(), size), slope=square, centre=empty.clone(),
            spread=square.clone(), covariance=torch.eye(size).to(square),
            seed=int(torch.randint(2**62, ())),
        )  # fmt: skip

    def contribute(self, state: NoiseAwareState, x: Any, y: Tensor) -> Contributions:
        """Return what the examples of a batch contribute: moments first, then gradients."""
        if state.steps >= self.first:
            return super().contribute(state, x, y)
        clip = self.settings.clip if self.problem.private else 1.0
        return DenseContributions({"inputs": clip * _moments(x.flatten(1).to(state.inputs))})

    def update(self, state: NoiseAwareState, release: Mapping[str, Tensor]) -> NoiseAwareState:
        """Add a release to the round; at its end, move towards the posterior mean so far."""
        if state.steps < self.first:
            state.moments.add_(release["inputs"])
            state = dataclasses.replace(state, steps=state.steps + 1)
            if state.steps == self.first:
                state.inputs.copy_(self._like_the_data(state))
            return state
        steps, total = state.steps + 1 - self.first, self.problem.steps - self.first
        scale = self.prior.std * self.problem.n / self.problem.batch_size
        state.round.add_(self._flat(release).to(state.round), alpha=scale)
        state = dataclasses.replace(state, steps=state.steps + 1)
        before, after = ((s * self.rounds) // total for s in (steps - 1, steps))
        return self._closed(state, after) if after > before else state

    def posterior(self, state: NoiseAwareState, **record: Any) -> Posterior:
        """Return draws of the chains, one chain after the other."""
        settings = self.settings
        generator = torch.Generator(state.anchor.device).manual_seed(state.seed)
        drawn = annealed_chains(
            self.surrogate(state), settings.chains, settings.iterations, settings.keep,
            settings.leaps, generator,
        ).flatten(0, 1)  # fmt: skip
        model = self.problem.rebuilt(state.parameters)
        draws = torch.func.vmap(self._named)(drawn)
        folder = settings.folder or self.problem.folder
        return IteratePosterior.of_draws(model, self.problem.likelihood, draws, folder, **record)

    def surrogate(self, state: NoiseAwareState) -> Surrogate:
        """Return the likelihood of the released average."""
        total, like = max(state.weight, 1.0), state.anchor
        root = torch.linalg.cholesky(self._covariance(state))

        def white(rows: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(root, rows.to(root).mT / total, upper=False).mT

        slope = white(state.slope)
        return Surrogate(
            lambda weights: self._outputs(weights, state.inputs).softmax(-1).flatten(1),
            white(state.features).to(like),
            white(state.release[None])[0].to(like),
            slope @ slope.mT,
        )

    @torch.no_grad()
    def _closed(self, state: NoiseAwareState, number: int) -> NoiseAwareState:
        """Return the state after a round: sums moved on, weights nearer to the linearised mean.

        With J the outputs' derivatives at an input, r_k the slope of the negative log-likelihood at
        outcome k and c_k the clip's factor, the release has slope H = n E[J' h J] in the weights
        and covariance V = n E[J' v J], h = sum_k p_k c_k r_k r_k' and v = sum_k p_k c_k^2 r_k r_k'.
        What is not known of the data's inputs adds (1 + n/m) (h - (h^-1 + J S J')^-1) to v, S the
        covariance of the weights and m the number of public inputs.
        """
        problem, inputs = self.problem, state.inputs
        each = problem.n / len(inputs)
        here = ((self._flat(state.parameters) - self.prior.mean) / self.prior.std).to(inputs)
        jacobian = self._jacobian(here, inputs).double()
        chances = self._outputs(here, inputs).double().softmax(-1)
        slopes = chances[:, None] - torch.eye(chances.shape[1]).to(chances)
        clip = self.settings.clip if problem.private else math.inf
        clipped = clipped_scores(jacobian / self.prior.std, slopes, clip)
        slope = (chances[..., None] * clipped).mT @ slopes
        spread = (chances[..., None] * clipped).mT @ clipped
        reach = jacobian @ state.covariance @ jacobian.mT
        unit = torch.eye(slope.shape[1]).to(slope)
        spread = spread + (1 + each) * (slope - torch.linalg.solve(unit + slope @ reach, slope))
        rows = jacobian.flatten(0, 1)
        slope = each * rows.mT @ (slope @ jacobian).flatten(0, 1)
        features = each * (clipped @ jacobian).flatten(0, 1)
        total = problem.steps - self.first
        length = state.steps - self.first - -(-(number - 1) * total // self.rounds)
        released = state.round / length
        centre = slope @ here.double() - released + chances.flatten() @ features
        weight = float(number) ** 2
        state.round.zero_()
        state.release.add_(released, alpha=weight)
        state.features.add_(features.to(state.features), alpha=weight)
        state.slope.add_(slope, alpha=weight)
        state.centre.add_(centre, alpha=weight)
        state.spread.addmm_(rows.mT, (spread @ jacobian).flatten(0, 1), alpha=weight * each)
        state = dataclasses.replace(
            state,
            weight=state.weight + weight,
            squares=state.squares + weight**2 / length,
        )
        covariance, mean = self._linearised(state)
        move = mean - here.double()
        change = float((rows @ move).square().mean().sqrt())
        self._place(state.parameters, here + min(_STEP, _FAR / max(change, 1e-9)) * move.to(here))
        return dataclasses.replace(state, covariance=covariance)

    def _linearised(self, state: NoiseAwareState) -> tuple[Tensor, Tensor]:
        """Return covariance and mean of the weights where outputs are linear in them."""
        slope, anchor = state.slope / state.weight, state.anchor.double()
        gain = torch.linalg.solve(self._covariance(state), slope)
        precision = slope @ gain
        precision = (precision + precision.mT) / 2 + torch.eye(len(anchor)).to(precision)
        covariance = torch.linalg.inv(precision).contiguous()
        residual = state.centre / state.weight - slope @ anchor
        return covariance, anchor + covariance @ (gain.mT @ residual)

    @property
    def _noise_std(self) -> float:
        """Standard deviation of the noise in a release."""
        return self.settings.clip * max(self.problem.sigmas, default=0.0)

    def _covariance(self, state: NoiseAwareState) -> Tensor:
        """Return the covariance of the released average, privacy noise and batches included."""
        problem, total = self.problem, max(state.weight, 1.0)
        steps = state.squares / total**2
        batches = 1 + (problem.n / problem.batch_size - 1) * steps
        covariance = state.spread / total * batches
        noise = self.prior.std * problem.n / problem.batch_size * self._noise_std
        least = _JITTER * covariance.diagonal().mean() + (0.0 if state.weight else 1.0)
        covariance.diagonal().add_(noise**2 * steps + least)
        return (covariance + covariance.mT) / 2

    def _outputs(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs at standardised weights [P], or at each row of [S, P]."""
        if weights.dim() == 2:
            rows: Tensor = vmap(lambda row: self._outputs(row, inputs))(weights)
            return rows
        named = self._named(weights)
        tied = {place: named[name] for name in named for place in self.places[name]}
        found: Tensor = functional_call(self.public, tied, (inputs,), tie_weights=False)
        return found

    def _jacobian(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs' derivatives by the standardised weights, [inputs, outputs, P]."""
        one = jacrev(lambda w, x: self._outputs(w, x[None])[0])
        found: Tensor = vmap(one, (None, 0))(weights, inputs)
        return found

    def _given_inputs(self, like: Tensor) -> Tensor:
        """Return the user's public inputs, or evenly spread ones in [-1, 1]."""
        count, given = self.settings.points, self.settings.inputs
        if given is not None:
            return torch.as_tensor(given(count)).to(like)
        first = next((m for m in self.public.modules() if list(m.parameters(recurse=False))), None)
        if not isinstance(first, nn.Linear):
            raise UnsupportedModel(
                "the network does not begin with a Linear layer, so that its inputs are not known; "
                "give public ones, as in NoiseAware(inputs=lambda count: torch.rand(count, 1, 8))"
            )
        seed = int(torch.randint(2**31, ()))
        spread = torch.quasirandom.SobolEngine(first.in_features, scramble=True, seed=seed)
        return spread.draw(count).to(like) * 2 - 1

    def _like_the_data(self, state: NoiseAwareState) -> Tensor:
        """Return inputs that have the means and covariances that were released.

        A released mean or second moment m of variance s^2 is taken as u + (m - u) t^2/(t^2 + s^2),
        u that of uniform inputs and t how far the data's are thought to be from it.
        """
        problem, columns = self.problem, state.inputs.shape[1]
        clip = self.settings.clip if problem.private else 1.0
        scale = problem.n / (problem.batch_size * self.first * clip)
        batches = (problem.n / problem.batch_size - 1) / (3 * problem.n * self.first)
        noise = scale * self._noise_std * math.sqrt(self.first) / problem.n
        first = torch.tensor(columns, dtype=torch.float64).sqrt() * math.sqrt(2)
        released = state.moments * scale / problem.n
        mean, second = released[:columns] * first, released[columns:] * columns * math.sqrt(2)
        mean = mean * _shrunk(_MEANS, (noise * first) ** 2 + batches)
        uniform = torch.eye(columns).to(second) / 3
        second = second.view(columns, columns)
        second = (second + second.mT) / 2 - uniform
        second = uniform + second * _shrunk(_SECOND, (noise * columns) ** 2 * 1.5 + batches)
        covariance = second - torch.outer(mean, mean)
        return with_moments(state.inputs.double(), mean, covariance).to(state.inputs)

    def _flat(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[name].detach().flatten() for name in self.shapes])

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the network's weights at standardised ones."""
        parts = weights.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: self.prior.mean + self.prior.std * part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def _place(self, parameters: Mapping[str, Tensor], weights: Tensor) -> None:
        with torch.no_grad():
            for name, value in self._named(weights).items():
                parameters[name].copy_(value)


def _moments(x: Tensor) -> Tensor:
    """Return (x / sqrt(d), x x' / d) / sqrt(2) of every row, of norm at most 1 within [-1, 1]."""
    columns = x.shape[1]
    products = (x[:, :, None] * x[:, None, :]).flatten(1) / columns
    return torch.cat([x / math.sqrt(columns), products], 1) / math.sqrt(2)


def _shrunk(spread: float, variance: Tensor | float) -> Tensor | float:
    return spread**2 / (spread**2 + variance)


def _last_layer(model: nn.Module) -> list[str]:
    """Return the names of the weights of the last Linear layer."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [f"{linear[-1]}.{own}".strip(".") for own in ("weight", "bias")] if linear else []
