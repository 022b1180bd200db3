"""Methods that hand a gradient to an optimizer: their settings, their state, their steps."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import Attached
from dpbnn.methods.method import Method, Problem, Process, name_of
from dpbnn.methods.optimizers import RULES, SCHEDULES, Rule
from dpbnn.methods.state import UNSAVED, Average, State
from dpbnn.privacy.checks import check_numbers, check_positive, first_line

if TYPE_CHECKING:
    from dpbnn.privacy.plan import Plan

OptimizerLike = str | Callable[..., torch.optim.Optimizer]
ScheduleLike = str | Callable[[torch.optim.Optimizer], Any] | None
_COUNTED = re.compile(r"optimizer\.[0-9]+\.step")


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
        if isinstance(self.optimizer, str) and self.optimizer not in RULES:
            raise ValueError(f"optimizer={self.optimizer!r}: must be one of {list(RULES)}")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}: must be one of {list(SCHEDULES)}")
        decay = isinstance(self.average, float) and 0 < self.average < 1
        if self.average is not None and self.average != "polyak" and not decay:
            raise ValueError(f"average={self.average!r}: must be None, 'polyak' or a decay < 1")

    def check_units(self) -> None:
        """Take units of several records: the loss is then a mean over units of their sums."""

    def settled(self, plan: Plan) -> tuple[Plan, float]:
        """Return the plan as it is, and the clip."""
        return plan, self.clip if plan.private else math.inf

    @property
    def rule(self) -> Rule | None:
        """The update where optimizer and schedule go by name; None where one is the user's own."""
        if callable(self.optimizer) or callable(self.schedule):
            return None
        return RULES[self.optimizer]

    def rate(self, steps: int, total: int) -> float:
        """Return the learning rate after so many steps of a total, for a schedule by name."""
        if self.schedule is None:
            return self.learning_rate
        assert isinstance(self.schedule, str)
        return self.learning_rate * SCHEDULES[self.schedule](min(1.0, steps / max(1, total)))

    def build(self, parameters: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer of torch, where it or the schedule is the user's own."""
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
                    f"{name}={name_of(given)}: cannot take a step that is given nothing but a "
                    f"gradient ({first_line(error)}); use another one, such as "
                    f"{'torch.optim.Adam' if name == 'optimizer' else repr('cosine')}"
                ) from None


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescentState(State):
    """State of methods that hand a gradient to an optimizer.

    Attributes:
        optimizer: what an optimizer by name keeps (see `Rule.memory`); or the user's own of torch,
            with the state that it keeps itself.
        schedule: of the learning rate of the latter, or None.
        average: of the parameters.
    """

    optimizer: torch.optim.Optimizer | dict[str, Tensor]
    schedule: Any = dataclasses.field(default=None, metadata=UNSAVED)
    average: Average = dataclasses.field(default_factory=Average)


class DescentProcess(Process[DescentState]):
    """Hands gradients of a loss that is a mean over records to an optimizer."""

    def __init__(self, settings: Descent, problem: Problem, attached: Attached) -> None:
        super().__init__(problem, attached)
        self.settings = settings

    def begin(self) -> DescentState:
        """Return the state before the first step."""
        parameters, settings = self.problem.trainable(), self.settings
        moved = list(parameters.values())
        if settings.rule is not None:
            memory = settings.rule.memory(moved, settings.momentum)
            return DescentState(parameters=parameters, optimizer=memory)
        settings.rehearse(moved)
        optimizer = settings.build(moved)
        started: Any = None
        if callable(settings.schedule):
            started = settings.schedule(optimizer)
        elif settings.schedule is not None:
            total = max(1, self.problem.steps)
            factor = SCHEDULES[settings.schedule]
            started = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: factor(min(1.0, step / total))
            )
        return DescentState(parameters=parameters, optimizer=optimizer, schedule=started)

    def resumed(self, state: DescentState, tensors: Mapping[str, Tensor]) -> DescentState:
        """Return a first state at the values that a checkpoint holds; its schedule runs anew."""
        state = super().resumed(state, tensors)
        if state.schedule is not None:
            assert isinstance(state.optimizer, torch.optim.Optimizer)
            for _ in range(state.steps):
                state.optimizer.step()
                state.schedule.step()
        return state

    def read(self, names: Iterable[str]) -> set[str]:
        """Return all names but the counts of steps that optimizers of torch had in their place."""
        named = self.settings.rule is not None
        return {name for name in names if not (named and _COUNTED.fullmatch(name))}

    @abstractmethod
    def gradient(self, state: DescentState, release: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of (data term + prior term) / n by parameter name."""

    def update(self, state: DescentState, release: Mapping[str, Tensor]) -> DescentState:
        """Take an optimizer step, and average."""
        rule, rate = self.settings.rule, None
        if rule is not None:
            rate = self.settings.rate(state.steps, self.problem.steps)
        descend = functools.partial(self._descend, state, release, rate)
        if rule is not None and rule.fixed:
            self.replays(("update", rate), descend, (release, state.drawn))
        else:  # Adam's step depends on its number; a user's own may do anything
            descend()
        if state.schedule is not None:
            state.schedule.step()
        kind, steps, average = self.settings.average, state.steps + 1, state.average
        if kind is not None:
            how = {"share": 1.0, "decay": kind} if isinstance(kind, float) else {}
            average = average.add(state.parameters, steps, self.problem.steps, **how)
        return dataclasses.replace(state, steps=steps, average=average)

    def _descend(
        self, state: DescentState, release: Mapping[str, Tensor], rate: float | None
    ) -> None:
        """Move the parameters.

        Args:
            state: theirs.
            release: of this step.
            rate: the learning rate of an optimizer by name.
        """
        settings, optimizer = self.settings, state.optimizer
        with torch.no_grad():
            found = self.gradient(state, release)
            moved = list(state.parameters.values())
            given = [found[name].to(p.dtype) for name, p in state.parameters.items()]
            if not isinstance(optimizer, torch.optim.Optimizer):
                assert settings.rule is not None
                assert rate is not None
                settings.rule(
                    moved, given, optimizer,
                    rate=rate, momentum=settings.momentum, count=state.steps + 1,
                )  # fmt: skip
                return
            for parameter, gradient in zip(moved, given, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def final(self, state: DescentState) -> nn.Module:
        """Return the network at its last weights, or at their average."""
        return self.problem.rebuilt({**state.parameters, **state.average.values})
