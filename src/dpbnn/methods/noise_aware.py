"""Noise-aware inference: chains that sample the weights given what the gate released."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.likelihoods import Categorical
from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import State
from dpbnn.methods.surrogate import Surrogate, annealed_chains, clipped_scores
from dpbnn.posteriors import IteratePosterior, IterateWriter, Posterior
from dpbnn.priors import Gaussian
from dpbnn.privacy.checks import check_count, check_positive
from dpbnn.privacy.plan import Plan

LARGEST = 2000  # weights, as matrices of their square are kept
_JITTER = 1e-2  # of the mean variance, added to all, so that no direction is taken for exact
_STEP, _FAR = 0.5, 3.0  # share of the way to the linearised mean; most change of an output, rms


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseAware(Method):
    """Bayesian inference of the weights from the noised sum of clipped scores.

    The run has rounds. In round r the gate releases the clipped gradients at public weights w_r,

        g_r = sum_i clip(grad nll_i(w_r)) + noise.

    If the data come from weights w, the releases, averaged with weights a_r, are Gaussian with

        mean        n E_x sum_y p_w(y | x) t(x, y),    t(x, y) = sum_r a_r clip(grad nll(x, y; w_r))
        covariance  V + s^2 I,

    V of the sample and s^2 of the privacy noise, both known. Inputs x are public: uniform in
    [-1, 1], the range that the estimators scale to, or what `inputs` gives. So the clip and the
    noise are part of the model: the posterior given the release is no more certain than the release
    allows. After each round w_r moves to the posterior mean of the linearised network. At the end
    Hamiltonian Monte Carlo samples the posterior under the true prior; that costs no privacy.

    An example contributes its gradient, so the sensitivity is the clip. It is for classes, a
    Gaussian prior and at most 2000 weights.

    Reference: Wood, Statistical inference for noisy nonlinear ecological dynamic systems, 2010
    (synthetic likelihood); Bernstein and Sheldon, Differentially private Bayesian inference for
    exponential families, 2018 (noise-aware posteriors).

    Attributes:
        clip: C, largest norm of one record's gradient.
        rounds: how often the point moves at which gradients are taken.
        points: number of public inputs.
        inputs: function of a number that returns so many public inputs, distributed as the data
            are believed to be; uniform in [-1, 1] by default.
        chains: number of chains.
        iterations: of every chain.
        keep: draws stored of every chain.
        leaps: leapfrog steps of an iteration.
        folder: where draws are written; a temporary folder by default.
    """

    clip: float = 3.0
    rounds: int = 20
    points: int = 500
    inputs: Callable[[int], Tensor] | None = None
    chains: int = 16
    iterations: int = 100
    keep: int = 25
    leaps: int = 5
    folder: str | None = None

    name = "noiseaware"

    def __post_init__(self) -> None:
        check_positive(clip=self.clip)
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
        self.public = copy.deepcopy(problem.origin).eval()
        self.shapes = {name: p.shape for name, p in problem.trainable().items()}
        self.rounds = min(settings.rounds, problem.steps)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def begin(self) -> NoiseAwareState:
        """Return the state before the first step: a prior draw whose last layer is the mean."""
        parameters = self.problem.trainable()
        first = next(iter(parameters.values()))
        anchor = {name: torch.randn_like(p) for name, p in parameters.items()}
        for name in _last_layer(self.public):
            if name in anchor:
                anchor[name].zero_()
        flat = self._flat(anchor)
        inputs = self._public_inputs(first)
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
            parameters=parameters, inputs=inputs, anchor=flat, round=empty, release=empty.clone(),
            features=flat.new_zeros(outputs.numel(), size), slope=square, centre=empty.clone(),
            spread=square.clone(), covariance=torch.eye(size).to(square),
            seed=int(torch.randint(2**62, ())),
        )  # fmt: skip

    def update(self, state: NoiseAwareState, release: Mapping[str, Tensor]) -> NoiseAwareState:
        """Add a release to the round; at its end, move to the posterior mean so far."""
        steps, total = state.steps + 1, self.problem.steps
        scale = self.prior.std * self.problem.n / self.problem.batch_size
        state.round.add_(self._flat(release).to(state.round), alpha=scale)
        state = dataclasses.replace(state, steps=steps)
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
        with self._open_writer(self._named(drawn[0]), len(drawn)) as writer:
            for row in drawn:
                writer.append(self._named(row))
        posterior = IteratePosterior(model, self.problem.likelihood, writer.path, **record)
        if self._temporary is not None:
            weakref.finalize(posterior, self._temporary.cleanup)
        return posterior

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
        length = state.steps - -(-(number - 1) * problem.steps // self.rounds)
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

    def _covariance(self, state: NoiseAwareState) -> Tensor:
        """Return the covariance of the released average, privacy noise and batches included."""
        problem, total = self.problem, max(state.weight, 1.0)
        steps = state.squares / total**2
        batches = 1 + (problem.n / problem.batch_size - 1) * steps
        covariance = state.spread / total * batches
        released = self.settings.clip * max(problem.sigmas, default=0.0)
        noise = self.prior.std * problem.n / problem.batch_size * released
        least = _JITTER * covariance.diagonal().mean() + (0.0 if state.weight else 1.0)
        covariance.diagonal().add_(noise**2 * steps + least)
        return (covariance + covariance.mT) / 2

    def _outputs(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs at standardised weights [P], or at each row of [S, P]."""
        if weights.dim() == 2:
            return vmap(lambda row: self._outputs(row, inputs))(weights)
        return functional_call(self.public, self._named(weights), (inputs,))

    def _jacobian(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """Return the outputs' derivatives by the standardised weights, [inputs, outputs, P]."""
        one = jacrev(lambda w, x: self._outputs(w, x[None])[0])
        return vmap(one, (None, 0))(weights, inputs)

    def _public_inputs(self, like: Tensor) -> Tensor:
        count, given = self.settings.points, self.settings.inputs
        if given is not None:
            return torch.as_tensor(given(count)).to(like)
        first = next((m for m in self.public.modules() if list(m.parameters(recurse=False))), None)
        if not isinstance(first, nn.Linear):
            raise UnsupportedModel(
                "the network does not begin with a Linear layer, so that its inputs are not known; "
                "give public ones, as in NoiseAware(inputs=lambda count: torch.rand(count, 1, 8))"
            )
        return torch.rand(count, first.in_features).to(like) * 2 - 1

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

    def _open_writer(self, like: Mapping[str, Tensor], count: int) -> IterateWriter:
        folder = self.settings.folder or self.problem.folder
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(
                prefix="dpbnn-", ignore_cleanup_errors=True
            )
            folder = self._temporary.name
        path = Path(folder) / "iterates.safetensors"
        path.unlink(missing_ok=True)
        return IterateWriter(path, like, count)


def _last_layer(model: nn.Module) -> list[str]:
    """Return the names of the weights of the last Linear layer."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [f"{linear[-1]}.{own}".strip(".") for own in ("weight", "bias")] if linear else []
