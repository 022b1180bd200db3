"""DP-SGLD and DP-SGHMC: samples of the posterior, whose own noise is the privacy noise."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbnn.methods.method import Method, Problem, Process
from dpbnn.methods.state import State, together
from dpbnn.posteriors import IteratePosterior, IterateWriter, Posterior
from dpbnn.priors import Gaussian, Prior
from dpbnn.privacy.checks import check_count, check_numbers, check_positive
from dpbnn.privacy.group import Group
from dpbnn.privacy.langevin import DRIFT, sgld_noise_multiplier
from dpbnn.privacy.plan import Plan, plan

_FILE = "iterates.safetensors"
Rate = float | Callable[[int], float]


def cyclical(learning_rate: float, cycles: int, steps: int) -> Callable[[int], float]:
    """Return the cyclical schedule eta_t = eta/2 (cos(pi (t mod L)/L) + 1), L = steps/cycles.

    Reference: Zhang et al., Cyclical stochastic gradient MCMC, 2020.
    """
    check_positive(learning_rate=learning_rate, cycles=cycles, steps=steps)
    length = steps / cycles
    return lambda t: learning_rate / 2 * (math.cos(math.pi * (t % length) / length) + 1)


_MEASURED = 1024  # numbers of each parameter on which the noise of releases is measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Langevin(Method):
    """Settings that SGLD and SGHMC share.

    Attributes:
        learning_rate: eta, one number or a function of the step.
        clip: C; None solves for the clip that meets the plan. Of (learning rate, clip, sigma) two
            are free: three that disagree are an error.
        temperature: tau; exp(-U/tau) is sampled, where batches are large and steps small.
        keep: how many of the last iterates are stored.
        thin: store every thin-th iterate.
        chains: independent chains; all of them are paid for out of the plan's epsilon.
        dtype: "float32" or "bfloat16", of the stored iterates.
        folder: where iterates are written; a temporary folder by default.
    """

    learning_rate: Rate = 1e-5
    clip: float | None = None
    temperature: float = 1.0
    keep: int = 100
    thin: int = 1
    chains: int = 1
    dtype: str = "float32"
    folder: str | None = None
    over_ranks = True

    def __post_init__(self) -> None:
        rate = None if callable(self.learning_rate) else self.learning_rate
        check_positive(learning_rate=rate, clip=self.clip, temperature=self.temperature)
        check_count(keep=self.keep, thin=self.thin, chains=self.chains)
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: must be 'float32' or 'bfloat16'")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        value = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        if not (0 < value < math.inf):
            raise ValueError(f"learning_rate={value} at step {step}: must be a finite number > 0")
        return value

    @abstractmethod
    def unit(self, n: int, batch_size: float) -> float:
        """Return sigma * C * sqrt(eta), which the update's equation fixes."""

    @abstractmethod
    def diffusion(self, eta: float) -> float:
        """Return the variance that the injected noise of one step adds to a weight in the end."""

    def caveats(self, plan: Plan, prior: Prior) -> tuple[str, ...]:
        """Return that of all methods, and whether the noise is too small to cross the prior.

        Without gradients a chain of T steps moves a weight by N(0, sum_t diffusion(eta_t)). Where
        that is less than the prior's, directions that the data leave open keep near their start.
        """
        found = super().caveats(plan, prior)
        std = prior.std if isinstance(prior, Gaussian) else None
        length = plan.steps // self.chains if plan.steps >= self.chains else plan.steps
        reach = math.sqrt(sum(self.diffusion(self.rate(step)) for step in range(length)))
        if std is not None and reach < std:
            found += (
                f"in a chain of {length} steps the injected noise moves a weight by {reach:.2g} at "
                f"most, and the prior's std is {std:g}: the iterates are points of a training "
                f"path, which does not reach all plausible weights, and bands are too narrow",
            )
        return found

    def noise_multipliers(
        self, n: int, batch_size: float, steps: int, clip: float | None = None
    ) -> list[float]:
        """Return sigma of every step of one chain, as the steps that run have it.

        Args:
            n: number of records.
            batch_size: expected batch size.
            steps: steps of one chain.
            clip: C; the settings' by default.
        """
        clip = self.clip if clip is None else clip
        if clip is None:
            raise ValueError("clip: missing; sigma follows from the learning rate and the clip")
        unit = self.unit(n, batch_size)
        return [unit / (clip * math.sqrt(self.rate(step))) for step in range(steps)]

    def check_units(self) -> None:
        """Take units of several records: batches of units have the same share of the posterior."""

    def settled(self, given: Plan) -> tuple[Plan, float]:
        """Return the plan with the sigma of every step, within the given epsilon, and the clip."""
        if not given.private:
            runs = ((0.0, self.chains * given.steps),)
            return dataclasses.replace(given, noise_multipliers=runs), math.inf
        common: dict[str, Any] = {
            "delta": given.delta, "n": given.n, "batch_size": given.batch_size,
            "steps": self.chains * given.steps, "sampling": given.sampling,
            "relation": given.relation, "accountant": given.accountant, "beside": given.beside,
        }  # fmt: skip
        if self.clip is not None:
            sigmas = self.noise_multipliers(given.n, given.batch_size, given.steps) * self.chains
            settled = plan(noise_multiplier=sigmas, **common)
            if settled.epsilon > given.epsilon * (1 + 1e-6):
                raise ValueError(
                    f"learning_rate and clip={self.clip:g} make sigma "
                    f"{settled.noise_multiplier:.5g} and epsilon {settled.epsilon:.4g}, over the "
                    f"plan's {given.epsilon:.4g}; leave the clip out to have it solved for, or "
                    f"lower one of them"
                )
            return settled, self.clip
        shape = self.noise_multipliers(given.n, given.batch_size, given.steps, clip=1.0)
        constant = self.chains == 1 and len(set(shape)) == 1 and len(given.noise_multipliers) == 1
        if constant:
            return given, shape[0] / given.noise_multiplier
        settled = plan(epsilon=given.epsilon, schedule=shape * self.chains, **common)
        return settled, shape[0] / settled.noise_multipliers[0][0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLD(Langevin):
    """Stochastic gradient Langevin dynamics, Algorithm 2 of the DP-BNN paper.

        half-step:  w <- w - (eta/2) ((n/b) release + grad r),   injected variance eta tau
        paper:      w <- w -  eta    ((n/b) release + grad r),   injected variance 2 eta tau

    The injected noise is the gate's (Theorem 1): sigma = (b/(nC)) sqrt(2 tau/a) for drift a. An
    example contributes its gradient, so the sensitivity is the clip. Without privacy the process
    adds the same noise itself.
    """

    convention: str = "half-step"

    name = "sgld"

    @classmethod
    def paper(cls, learning_rate: Rate = 5e-6, clip: float | None = 1.5, **settings: Any) -> SGLD:
        """Return the paper's update: drift eta, noise variance eta, which is temperature 1/2."""
        defaults = {"temperature": 0.5, "convention": "paper"}
        return cls(learning_rate=learning_rate, clip=clip, **{**defaults, **settings})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.convention not in DRIFT:
            raise ValueError(f"convention={self.convention!r}: must be 'half-step' or 'paper'")

    @property
    def drift(self) -> float:
        """Share of the learning rate that moves along the gradient."""
        return DRIFT[self.convention]

    def unit(self, n: int, batch_size: float) -> float:
        """Return sigma * C * sqrt(eta) = (b/n) sqrt(2 tau / drift)."""
        tau = self.temperature
        return sgld_noise_multiplier(1.0, 1.0, n, batch_size, tau, self.convention)

    def diffusion(self, eta: float) -> float:
        """Return 2 a eta tau, a the share of the convention."""
        return 2 * self.drift * eta * self.temperature

    def start(self, problem: Problem) -> SGLDProcess:
        """Return the process that trains on a problem."""
        return SGLDProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGHMC(Langevin):
    """Stochastic gradient Hamiltonian Monte Carlo with friction a.

        v <- (1 - a) v - eta ((n/b) release + grad r),   injected variance 2 a eta tau;   w <- w + v

    so sigma = (b/(nC)) sqrt(2 a tau / eta). The momentum is post-processing of earlier releases.

    Reference: Chen, Fox, Guestrin, Stochastic gradient Hamiltonian Monte Carlo, 2014.
    """

    friction: float = 0.1

    name = "sghmc"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(friction=self.friction)
        if not (0 < self.friction <= 1):
            raise ValueError(f"friction={self.friction}: must lie in (0, 1]")

    def unit(self, n: int, batch_size: float) -> float:
        """Return sigma * C * sqrt(eta) = (b/n) sqrt(2 a tau)."""
        return batch_size / n * math.sqrt(2 * self.friction * self.temperature)

    def diffusion(self, eta: float) -> float:
        """Return 2 eta tau / f: noise of variance 2 f eta tau moves the weight by 1/f of it."""
        return 2 * eta * self.temperature / self.friction

    def start(self, problem: Problem) -> SGHMCProcess:
        """Return the process that trains on a problem."""
        return SGHMCProcess(self, problem)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LangevinState(State):
    """State of `SGLD` and `SGHMC`; iterates go to disk.

    Attributes:
        first: parameters at the start, where every chain begins.
        velocity: of SGHMC, by parameter; of SGLD none.
        earlier: a part of the release before, of every second step.
        heat: sum over pairs of steps of the temperature that their noise has, one number.
        pairs: how many there are.
    """

    first: dict[str, Tensor]
    heat: Tensor
    earlier: Tensor
    velocity: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    pairs: int = 0


def _part(release: Mapping[str, Tensor]) -> Tensor:
    """Return the numbers of a release that its noise is measured on."""
    return torch.cat([value.flatten()[:_MEASURED] for value in release.values()])


class LangevinProcess(Process[LangevinState]):
    """Equations that SGLD and SGHMC share: chains, stored iterates, injected noise."""

    def __init__(self, settings: Langevin, problem: Problem) -> None:
        super().__init__(problem, problem.attach())
        self.settings = settings
        self.length = problem.steps // settings.chains
        stored = self.length // settings.thin
        self.kept = min(settings.keep, max(1, stored))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.iterates: Path | None = None

    def begin(self) -> LangevinState:
        """Return the state before the first step."""
        parameters = self.problem.trainable()
        first = {n: p.detach().clone() for n, p in parameters.items()}
        device = next(iter(parameters.values())).device
        heat = torch.zeros((), dtype=torch.float64, device=device)
        earlier = torch.zeros_like(_part(first))
        return LangevinState(parameters=parameters, first=first, heat=heat, earlier=earlier)

    def ready(self, state: LangevinState) -> None:
        """Reserve the disk space of all iterates."""
        if self.problem.leads:
            self._open_writer(state)

    @abstractmethod
    def move(
        self, state: LangevinState, name: str, drift: Tensor, eta: float, injected: Tensor | None
    ) -> None:
        """Move one parameter along (n/b) release + grad r; `injected` is unit noise, if any."""

    def update(self, state: LangevinState, release: Mapping[str, Tensor]) -> LangevinState:
        """Take a Langevin step; store the iterate when its turn has come."""
        problem, position = self.problem, state.steps % self.length
        if position == 0 and state.steps:
            self.restart(state)
        writer = self._open_writer(state) if problem.leads else None
        eta, scale = self.settings.rate(position), problem.n / problem.batch_size
        pair = position % 2 and position >= self.length // 2
        measured = "second" if pair else "first" if position % 2 == 0 else ""

        @torch.no_grad()
        def moved() -> None:
            self._measure(state, release, measured, eta)
            moving, released = state, release
            if not state.velocity:
                alike = not problem.own_priors
                parameters, released = together(state.parameters, release, alike=alike)
                moving = dataclasses.replace(state, parameters=parameters)
            for name, parameter in moving.parameters.items():
                drift = released[name] * scale + problem.prior_of(name).gradient(parameter)
                injected = None if problem.private else torch.randn_like(parameter)
                self.move(moving, name, drift.to(parameter.dtype), eta, injected)

        self.replays((eta, measured), moved, (release, state.earlier, state.heat))
        last = self.length - (position + 1)
        due = last % self.settings.thin == 0 and last // self.settings.thin < self.kept
        if due and writer is not None:
            writer.append({n: p.detach() for n, p in state.parameters.items()})
        return dataclasses.replace(state, steps=state.steps + 1, pairs=state.pairs + bool(pair))

    def _measure(
        self, state: LangevinState, release: Mapping[str, Tensor], which: str, eta: float
    ) -> None:
        """Measure the noise of a pair of releases: keep the first, compare the second with it.

        Gradients hardly change from one step to the next, so half the squared difference of two
        releases is the variance v of privacy noise and batches together, and v eta / (sigma C
        sqrt(eta))^2 of the settings is their temperature in units of tau. Only released numbers
        are used.
        """
        if which == "first":
            state.earlier.copy_(_part(release))
        if which != "second":
            return
        problem, tau = self.problem, self.settings.temperature
        unit = self.settings.unit(problem.n, problem.batch_size)
        change = (_part(release) - state.earlier).square().mean()
        state.heat.add_(change, alpha=tau * eta / (2 * unit**2))
        if not problem.private:
            state.heat.add_(tau)

    def _open_writer(self, state: LangevinState) -> IterateWriter:
        """Return the writer."""
        if self.writer is None:
            folder = self.settings.folder or self.problem.folder or self._own_folder()
            path, stored = Path(folder) / _FILE, self._stored(state.steps)
            if state.steps and not stored:
                path.unlink(missing_ok=True)
            self.writer = IterateWriter(
                path,
                {n: p.detach() for n, p in state.parameters.items()},
                self.kept * self.settings.chains,
                dtype=getattr(torch, self.settings.dtype),
                start=stored,
                hold=self.problem.folder is not None,
            )
        return self.writer

    def _stored(self, steps: int) -> int:
        """Return how many iterates have been stored after so many steps."""
        chains, position = divmod(steps, self.length)
        thin = self.settings.thin
        first = self.length - (self.kept - 1) * thin
        return chains * self.kept + (max(0, (position - first) // thin + 1) if position else 0)

    def restart(self, state: LangevinState) -> None:
        """Begin the next chain, at rest, and at fresh initial weights where layers can draw them.

        Frozen parameters and buffers stay as they are.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        with torch.no_grad():
            for name, parameter in state.parameters.items():
                parameter.copy_(state.first[name])
            for module in self.model.modules():
                own = [p.requires_grad for p in module.parameters(recurse=False)]
                if hasattr(module, "reset_parameters") and own and all(own):
                    module.reset_parameters()
            for buffer, value in buffers:
                buffer.copy_(value)
            for velocity in state.velocity.values():
                velocity.zero_()

    def share(self, state: LangevinState, group: Group) -> None:
        """Give every process of a group the iterates, each in a file of its own."""
        self.iterates = self._written(state) if self.problem.leads else self._own_folder() / _FILE
        group.copy_file(self.iterates)

    def _written(self, state: LangevinState) -> Path:
        writer = self._open_writer(state)
        writer.close()
        return writer.path

    def _own_folder(self) -> Path:
        self._temporary = tempfile.TemporaryDirectory(prefix="dpbnn-", ignore_cleanup_errors=True)
        return Path(self._temporary.name)

    def posterior(self, state: LangevinState, **record: Any) -> Posterior:
        """Return the stored iterates."""
        path = self.iterates or self._written(state)
        model = self.problem.rebuilt(state.parameters)
        if state.pairs:
            measured = float(state.heat) / state.pairs
            record["settings"] = {**record.get("settings", {}), "measured_temperature": measured}
        posterior = IteratePosterior(model, self.problem.likelihood, path, **record)
        if self._temporary is not None:
            weakref.finalize(posterior, self._temporary.cleanup)
        return posterior


class SGLDProcess(LangevinProcess):
    """Equations of `SGLD`."""

    settings: SGLD

    def move(
        self, state: LangevinState, name: str, drift: Tensor, eta: float, injected: Tensor | None
    ) -> None:
        """Move along -a eta drift, a the share of the convention."""
        step = self.settings.drift * eta
        state.parameters[name].sub_(drift, alpha=step)
        if injected is not None:
            std = math.sqrt(2 * self.settings.temperature * step)
            state.parameters[name].add_(injected, alpha=std)


class SGHMCProcess(LangevinProcess):
    """Equations of `SGHMC`."""

    settings: SGHMC

    def begin(self) -> LangevinState:
        """Return the state before the first step, at rest."""
        state = super().begin()
        zeros = {n: torch.zeros_like(p) for n, p in state.parameters.items()}
        return dataclasses.replace(state, velocity=zeros)

    def move(
        self, state: LangevinState, name: str, drift: Tensor, eta: float, injected: Tensor | None
    ) -> None:
        """Move the velocity along -eta drift, and the parameter along the velocity."""
        velocity = state.velocity[name]
        velocity.mul_(1 - self.settings.friction).sub_(drift, alpha=eta)
        if injected is not None:
            std = math.sqrt(2 * self.settings.friction * eta * self.settings.temperature)
            velocity.add_(injected, alpha=std)
        state.parameters[name].add_(velocity)
