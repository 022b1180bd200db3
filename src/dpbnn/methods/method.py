"""What all methods share: settings that start a process, and a process that trains."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import Attached, attach
from dpbnn.contributions.dense import Contributions, DenseContributions, UnsupportedModel
from dpbnn.likelihoods import Likelihood
from dpbnn.priors import Prior
from dpbnn.privacy.checks import check_numbers, check_positive, first_line

if TYPE_CHECKING:
    from dpbnn.posteriors import Posterior
    from dpbnn.privacy.plan import Plan

OptimizerLike = str | Callable[..., torch.optim.Optimizer]
ScheduleLike = str | Callable[[torch.optim.Optimizer], Any] | None


@dataclasses.dataclass(frozen=True)
class Problem:
    """Everything public that a process needs; the data is not in it.

    Attributes:
        model: the network, owned by the process from now on.
        likelihood: of the targets given the network's outputs; it is never called, see `attach`.
        prior: of the weights.
        n: number of records.
        batch_size: expected batch size.
        steps: number of releases.
        private: whether the gate adds noise.
        microbatch_size: most examples recorded at once.
        folder: where the process may keep files; None is a temporary one of its own.
        origin: the network before any data, never called; a copy of `model` by default.
    """

    model: nn.Module
    likelihood: Likelihood
    prior: Prior
    n: int
    batch_size: float
    steps: int
    private: bool
    microbatch_size: int | None = None
    folder: Path | None = None
    origin: nn.Module = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.origin is None:
            object.__setattr__(self, "origin", copy.deepcopy(self.model))

    def attach(self, likelihood: Likelihood | None = None, **options: Any) -> Attached:
        """Attach the model and a copy of the likelihood, or of another one; see `dpbnn.attach`."""
        options["microbatch_size"] = self.microbatch_size
        return attach(self.model, copy.deepcopy(likelihood or self.likelihood), **options)

    def rebuilt(self, released: Mapping[str, Tensor]) -> nn.Module:
        """Return the network as it was before any data, at released parameters.

        A posterior is made of this network alone: the one that was trained has seen the data.

        Args:
            released: trainable parameters by name; those left out stay at their first values.
        """
        model = copy.deepcopy(self.origin)
        with torch.no_grad():
            for name, value in released.items():
                model.get_parameter(name).copy_(value)
        return model

    def refuse_frozen(self, method: str) -> None:
        """Raise where a parameter is frozen, for methods that move all of them."""
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                raise UnsupportedModel(
                    f"{name!r} is frozen, and {method} moves all weights; unfreeze it, or use SGD, "
                    f"SGLD, BBP, VI or MCDropout"
                )


class Process(ABC):
    """A run of a method: contributes on data, updates on releases, leaves a posterior.

    `update` gets the release and nothing else, so whatever it does is post-processing.
    """

    def __init__(self, problem: Problem, attached: Attached) -> None:
        self.problem, self.model, self.attached = problem, problem.model, attached
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.steps = 0

    def ready(self) -> None:  # noqa: B027, most methods need nothing
        """Get hold of what the run needs, such as disk space, before anything is spent."""

    def close(self) -> None:  # noqa: B027, most methods hold nothing
        """Let go of what `ready` got hold of; what is on disk stays."""

    @property
    def held_bytes(self) -> int:
        """Memory of what waits for the next `state`, which writes it to disk."""
        return 0

    def contribute(self, x: Any, y: Tensor) -> Contributions:
        """Return what the examples of a batch contribute."""
        return self.attached(x, y)

    def released(self) -> list[Tensor]:
        """Return the tensors of the network that an update moves: the trainable parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]

    @abstractmethod
    def update(self, release: Mapping[str, Tensor]) -> None:
        """Move on, given a clipped and noised sum of contributions."""

    @abstractmethod
    def posterior(self, **record: Any) -> Posterior:
        """Return what training has left so far; `record` is its privacy, prior and settings."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on from here, as tensors."""

    @abstractmethod
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""


class OpenProcess(Process):
    """A run of a method that visits raw records, without a gate; for open plans only."""

    def contribute(self, x: Any, y: Tensor) -> Contributions:
        """Return nothing of the records: what is not private has no release."""
        return DenseContributions(torch.zeros(len(x), 1, device=x.device))

    def update(self, release: Mapping[str, Tensor]) -> None:
        """Do nothing; see `visit`."""

    @abstractmethod
    def visit(self, x: Tensor, y: Tensor, records: Tensor) -> None:
        """Learn from raw records."""


class Method(ABC):
    """Settings of a method."""

    name: ClassVar[str]
    own_noise: ClassVar[bool] = False
    """Whether the method itself learns a Gaussian likelihood's noise."""

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network that is trained, such as one with Gaussian layers."""
        return model

    @abstractmethod
    def settled(self, plan: Plan) -> tuple[Plan, float | dict[str, float]]:
        """Return the plan as it will run, within the given one's epsilon, and the clip.

        Where the plan is open, so is the clip: infinite. A clip by block is that of `Gate`.
        """

    @abstractmethod
    def start(self, problem: Problem) -> Process:
        """Return a process at its first step."""

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, for manifests and reports."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = (int, float, str, bool, type(None))
        return {
            "method": self.name,
            **{k: v if isinstance(v, plain) else _name(v) for k, v in values.items()},
        }


def _name(value: Any) -> str:
    """Return a name that is the same in another process."""
    if isinstance(value, functools.partial):
        return f"partial({_name(value.func)}, {value.args}, {value.keywords})"
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Descent(Method):
    """Settings of methods that hand a gradient to an optimizer.

    Attributes:
        learning_rate: of the optimizer, for a loss that is a mean over records.
        clip: largest norm of one record's contribution.
        optimizer: "sgd", "adam", "rmsprop", "adagrad", or any function (parameters, lr=...) that
            returns a `torch.optim` optimizer.
        momentum: of "sgd" and "rmsprop".
        schedule: "cosine", "linear" (both fall to zero), or a function of the optimizer that
            returns a `torch.optim.lr_scheduler`.
        average: None; "polyak", the mean of the iterates of the last half; or the decay of an
            exponential moving average, such as 0.999. Averaging releases is free.
    """

    learning_rate: float = 0.1
    clip: float = 1.0
    optimizer: OptimizerLike = "sgd"
    momentum: float = 0.0
    schedule: ScheduleLike = None
    average: str | float | None = None

    def __post_init__(self) -> None:
        check_positive(learning_rate=self.learning_rate, clip=self.clip)
        check_numbers(momentum=self.momentum)
        if not (0 <= self.momentum < 1):
            raise ValueError(f"momentum={self.momentum}: must lie in [0, 1)")
        if isinstance(self.optimizer, str) and self.optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {list(_OPTIMIZERS)}")
        if isinstance(self.schedule, str) and self.schedule not in _SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}: must be one of {list(_SCHEDULES)}")
        decay = isinstance(self.average, float) and 0 < self.average < 1
        if self.average is not None and self.average != "polyak" and not decay:
            raise ValueError(f"average={self.average!r}: must be None, 'polyak' or a decay < 1")

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip."""
        return plan, self.clip if plan.private else math.inf

    def build(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        if callable(self.optimizer):
            return self.optimizer(parameters, lr=self.learning_rate)
        kind = _OPTIMIZERS[self.optimizer]
        extra = {"momentum": self.momentum} if self.optimizer in ("sgd", "rmsprop") else {}
        return kind(parameters, lr=self.learning_rate, **extra)

    def rehearse(self, parameters: list[Tensor]) -> None:
        """Raise where a user's optimizer or schedule cannot take a step as `update` takes it.

        An example is LBFGS, which evaluates the loss itself. It is tried on zeros, before anything
        is spent.

        Args:
            parameters: what will be trained; left as it is.
        """
        zeros = [torch.zeros_like(parameter).requires_grad_() for parameter in parameters]
        for name, given in (("optimizer", self.optimizer), ("schedule", self.schedule)):
            if isinstance(given, str) or given is None:
                continue
            try:
                optimizer: Any = self.build(zeros)
                for parameter in zeros:
                    parameter.grad = torch.zeros_like(parameter)
                schedule = given(optimizer) if name == "schedule" else None
                optimizer.step()
                if schedule is not None:
                    schedule.step()
            except Exception as error:
                raise ValueError(
                    f"{name}={_name(given)}: cannot take a step that is given nothing but a "
                    f"gradient ({first_line(error)}); use another one, such as "
                    f"{'torch.optim.Adam' if name == 'optimizer' else repr('cosine')}"
                ) from None


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
_SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(done * math.pi)),
    "linear": lambda done: 1 - done,
}


class DescentProcess(Process):
    """Hands gradients of a loss that is a mean over records to an optimizer."""

    def __init__(self, settings: Descent, problem: Problem, attached: Attached) -> None:
        super().__init__(problem, attached)
        self.settings = settings
        settings.rehearse(list(self.parameters.values()))
        self.optimizer = settings.build(list(self.parameters.values()))
        self._averages: dict[str, Tensor] = {}
        self._averaged = 0
        self._start_schedule()

    @abstractmethod
    def gradient(self, release: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the gradient of (data term + prior term) / n by parameter name."""

    def update(self, release: Mapping[str, Tensor]) -> None:
        """Take an optimizer step, and average."""
        with torch.no_grad():
            for name, gradient in self.gradient(release).items():
                self.parameters[name].grad = gradient.to(self.parameters[name].dtype)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if self.schedule is not None:
                self.schedule.step()
            self.steps += 1
            self._average()

    def _start_schedule(self) -> None:
        schedule, total = self.settings.schedule, max(1, self.problem.steps)
        if isinstance(schedule, str):
            factor = _SCHEDULES[schedule]
            self.schedule: Any = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda step: factor(min(1.0, step / total))
            )
        else:
            self.schedule = None if schedule is None else schedule(self.optimizer)

    def _average(self) -> None:
        kind = self.settings.average
        if kind is None or (kind == "polyak" and 2 * self.steps <= self.problem.steps):
            return
        self._averaged += 1
        decay = kind if isinstance(kind, float) else 1 - 1 / self._averaged
        for name, parameter in self.parameters.items():
            if name not in self._averages:
                self._averages[name] = parameter.detach().clone()
            else:
                self._averages[name].lerp_(parameter.detach(), 1 - decay)

    def final(self) -> nn.Module:
        """Return the network at its last weights, or at their average."""
        return self.problem.rebuilt({**self.parameters, **self._averages})

    def state(self) -> dict[str, Tensor]:
        """Return everything needed to go on from here, as tensors."""
        tensors: dict[str, Tensor] = {f"model.{n}": p for n, p in self.parameters.items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            for key, value in values.items():
                if value is not None:
                    tensors[f"optimizer.{index}.{key}"] = torch.as_tensor(value)
        tensors |= {f"average.{n}": v for n, v in self._averages.items()}
        tensors["counts"] = torch.tensor([self.steps, self._averaged])
        return {name: value.detach().clone().contiguous() for name, value in tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a `state`."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "average": {}}
        for name, value in state.items():
            kind, _, rest = name.partition(".")
            if rest:
                parts[kind][rest] = value
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parts["model"][name])
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        for name, value in parts["optimizer"].items():
            index, _, key = name.partition(".")
            saved["state"].setdefault(int(index), {})[key] = value.clone()
        self.optimizer.load_state_dict(saved)
        device = next(iter(self.parameters.values())).device
        self._averages = {name: value.to(device) for name, value in parts["average"].items()}
        self.steps, self._averaged = (int(v) for v in state["counts"])
        self._start_schedule()
        for _ in range(self.steps if self.schedule is not None else 0):
            self.optimizer.step()
            self.schedule.step()
