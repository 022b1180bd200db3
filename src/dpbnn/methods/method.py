"""What all methods share: settings that start a process, and a process that trains a state."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import Attached, attach
from dpbnn.contributions.dense import Contributions, UnsupportedModel
from dpbnn.likelihoods import Likelihood
from dpbnn.methods.state import UNSAVED, Average, State, restored
from dpbnn.networks.sharded import Sharding, Whole, local
from dpbnn.priors import Prior
from dpbnn.privacy.checks import check_numbers, check_positive, first_line

if TYPE_CHECKING:
    from dpbnn.posteriors import IterateWriter, Posterior
    from dpbnn.privacy.group import Group
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
        sigmas: the noise multiplier of every release.
        leads: whether this process keeps files; of several that train together one does.
        parts: how the network is run where its parameters are spread over ranks.
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
    sigmas: tuple[float, ...] = ()
    leads: bool = True
    parts: Whole = dataclasses.field(default_factory=Whole)

    def __post_init__(self) -> None:
        if self.origin is None:
            object.__setattr__(self, "origin", copy.deepcopy(self.model))

    def attach(self, likelihood: Likelihood | None = None, **options: Any) -> Attached:
        """Attach the model and a copy of the likelihood, or of another one; see `dpbnn.attach`."""
        options["microbatch_size"] = self.microbatch_size
        made = attach(self.model, copy.deepcopy(likelihood or self.likelihood), **options)
        made.parts = self.parts
        return made

    def rebuilt(self, released: Mapping[str, Tensor]) -> nn.Module:
        """Return the network as it was before any data, at released parameters.

        A posterior is made of this network alone: the one that was trained has seen the data.

        Args:
            released: trainable parameters by name; those left out stay at their first values.
        """
        model = copy.deepcopy(self.origin)
        if isinstance(self.parts, Sharding):
            return model  # without values, which stay with the ranks
        with torch.no_grad():
            for name, value in released.items():
                model.get_parameter(name).copy_(value)
        return model

    def trainable(self) -> dict[str, Tensor]:
        """Return the trainable parameters of the model, by name; of sharded ones the own rows."""
        return {n: local(p) for n, p in self.model.named_parameters() if p.requires_grad}

    def refuse_frozen(self, method: str) -> None:
        """Raise where a parameter is frozen, for methods that move all of them."""
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                raise UnsupportedModel(
                    f"{name!r} is frozen, and {method} moves all weights; unfreeze it, or use SGD, "
                    f"SGLD, BBP, VI or MCDropout"
                )


S = TypeVar("S", bound=State)
Replay = Callable[[Hashable, Callable[[], Any], Any], Any]


def _now(key: Hashable, work: Callable[[], Any], reads: Any) -> Any:
    return work()


class AnyProcess(ABC, Generic[S]):
    """What all processes share: a first state, a writer of iterates if any, and a posterior."""

    writer: IterateWriter | None = None

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model = problem, problem.model

    def begin(self) -> S:
        """Return the state before the first step."""
        return State(parameters=self.problem.trainable())  # type: ignore[return-value]

    def resumed(self, state: S, tensors: Mapping[str, Tensor]) -> S:
        """Return a first state at the values that a checkpoint holds."""
        return restored(state, tensors)

    def ready(self, state: S) -> None:
        """Open `writer`, and reserve its disk space, before anything is spent."""

    def share(self, state: S, group: Group) -> None:
        """Give every process of a group the files that the posterior reads."""

    @abstractmethod
    def posterior(self, state: S, **record: Any) -> Posterior:
        """Return what training has left so far; `record` is its privacy, prior and settings."""


class Process(AnyProcess[S]):
    """The equations of a method on one problem: what a batch contributes, what a release changes.

    All that changes during a run is in the state, which is handed in and out. `update` gets the
    state and a release, so whatever it does is post-processing. `contribute` gets the data, and
    returns contributions alone.
    """

    attached: Attached
    replays: Replay = staticmethod(_now)
    """Runs work on tensors, given a key of what else it depends on, and what it reads."""

    def __init__(self, problem: Problem, attached: Attached | None = None) -> None:
        super().__init__(problem)
        if attached is not None:
            self.attached = attached

    def draw(self, state: S) -> S:
        """Return the state with what the next step draws without the data, such as weights."""
        return state

    def contribute(self, state: S, x: Any, y: Tensor) -> Contributions:
        """Return what the examples of a batch contribute."""
        return self.attached(x, y)

    @abstractmethod
    def update(self, state: S, release: Mapping[str, Tensor]) -> S:
        """Return the next state, given a clipped and noised sum of contributions."""


class OpenProcess(AnyProcess[S]):
    """The equations of a method that visits raw records: no gate, and open plans alone."""

    @abstractmethod
    def visit(self, state: S, x: Tensor, y: Tensor, records: Tensor) -> S:
        """Return the next state, given raw records and their numbers."""


class Method(ABC):
    """Settings of a method."""

    name: ClassVar[str]
    own_noise: ClassVar[bool] = False
    """Whether the method itself learns a Gaussian likelihood's noise."""
    noise_aware: ClassVar[bool] = False
    """Whether the spread of its posterior includes the privacy noise and the clip."""
    over_ranks: ClassVar[bool] = False
    """Whether several processes can train together: all they share is a sum and its release."""

    def prepared(self, model: nn.Module) -> nn.Module:
        """Return the network that is trained, such as one with Gaussian layers."""
        return model

    def check_units(self) -> None:
        """Raise where the method has no meaning for units of several records, such as persons."""
        raise ValueError(
            f"units: {type(self).__name__} is for single records; use SGD, SGLD, SGHMC, MCDropout, "
            f"VI, or BBP in weight space"
        )

    @abstractmethod
    def settled(self, plan: Plan) -> tuple[Plan, float | dict[str, float]]:
        """Return the plan as it will run, within the given one's epsilon, and the clip.

        Where the plan is open, so is the clip: infinite. A clip by block is that of `Gate`.
        """

    @abstractmethod
    def start(self, problem: Problem) -> AnyProcess[Any]:
        """Return the process that trains on a problem."""

    def caveats(self, plan: Plan, prior: Prior) -> tuple[str, ...]:
        """Return in words why the spread of predictions may be too small, from public numbers.

        Args:
            plan: as it runs.
            prior: of the weights.
        """
        if self.noise_aware or not plan.private:
            return ()
        return (
            f"the posterior of {type(self).__name__} leaves out the privacy noise and the clip, so "
            f"bands are too narrow, most of all at a small epsilon; NoiseAware, which is for "
            f"classes, includes both",
        )

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

    over_ranks = True

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

    def check_units(self) -> None:
        """Take units of several records: the loss is then a mean over units of their sums."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentState(State):
    """State of methods that hand a gradient to an optimizer.

    Attributes:
        optimizer: of torch, with the state that it keeps itself.
        schedule: of its learning rate, or None.
        average: of the parameters.
    """

    optimizer: torch.optim.Optimizer
    schedule: Any = dataclasses.field(default=None, metadata=UNSAVED)
    average: Average = dataclasses.field(default_factory=Average)


class DescentProcess(Process[DescentState]):
    """Hands gradients of a loss that is a mean over records to an optimizer."""

    def __init__(self, settings: Descent, problem: Problem, attached: Attached) -> None:
        super().__init__(problem, attached)
        self.settings = settings

    def begin(self) -> DescentState:
        """Return the state before the first step."""
        parameters = self.problem.trainable()
        self.settings.rehearse(list(parameters.values()))
        optimizer = self.settings.build(list(parameters.values()))
        schedule, total = self.settings.schedule, max(1, self.problem.steps)
        started: Any = None
        if isinstance(schedule, str):
            factor = _SCHEDULES[schedule]
            started = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: factor(min(1.0, step / total))
            )
        elif schedule is not None:
            started = schedule(optimizer)
        return DescentState(parameters=parameters, optimizer=optimizer, schedule=started)

    def resumed(self, state: DescentState, tensors: Mapping[str, Tensor]) -> DescentState:
        """Return a first state at the values that a checkpoint holds; its schedule runs anew."""
        state = super().resumed(state, tensors)
        for _ in range(state.steps if state.schedule is not None else 0):
            state.optimizer.step()
            state.schedule.step()
        return state

    @abstractmethod
    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of (data term + prior term) / n by parameter name."""

    def update(self, state: DescentState, release: Mapping[str, Tensor]) -> DescentState:
        """Take an optimizer step, and average."""
        descend = functools.partial(self._descend, state, release)
        if type(state.optimizer) is torch.optim.SGD:  # others count their steps on the host
            groups = [{**group, "params": 0} for group in state.optimizer.param_groups]
            key = tuple(value for group in groups for value in group.values())
            plain = all(isinstance(value, (int, float, type(None))) for value in key)
            optimizer: Any = state.optimizer
            hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            plain = plain and not any(hooks)  # Python that a replay would leave out
            (self.replays if plain else _now)(key, descend, (release, state.drawn))
        else:
            descend()
        if state.schedule is not None:
            state.schedule.step()
        kind, steps, average = self.settings.average, state.steps + 1, state.average
        if kind is not None:
            how = {"share": 1.0, "decay": kind} if isinstance(kind, float) else {}
            average = average.add(state.parameters, steps, self.problem.steps, **how)
        return dataclasses.replace(state, steps=steps, average=average)

    def _descend(self, state: DescentState, release: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, gradient in self.gradient(state, release).items():
                parameter = state.parameters[name]
                parameter.grad = gradient.to(parameter.dtype)
            state.optimizer.step()
            state.optimizer.zero_grad(set_to_none=True)

    def final(self, state: DescentState) -> nn.Module:
        """Return the network at its last weights, or at their average."""
        return self.problem.rebuilt({**state.parameters, **state.average.values})
