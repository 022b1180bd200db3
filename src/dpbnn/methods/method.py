"""What all methods share: settings that start a process, and a process that trains a state."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import Attached, attach
from dpbnn.contributions.dense import Contributions, UnsupportedModel
from dpbnn.likelihoods import Likelihood
from dpbnn.methods.state import State, restored
from dpbnn.networks import LearnedNoise
from dpbnn.networks.sharded import Sharding, Whole, local
from dpbnn.priors import Gaussian, Prior

if TYPE_CHECKING:
    from dpbnn.posteriors import IterateWriter, Posterior
    from dpbnn.privacy.group import Group
    from dpbnn.privacy.plan import Plan

_NOISE = Gaussian(1.0)


def own_priors(model: nn.Module, prior: Prior) -> dict[str, Prior]:
    """Return by name the prior of parameters that do not have that of the weights.

    A learned log-variance has N(0, 1): how far a function may bend says nothing about the noise.

    Args:
        model: the network.
        prior: of the weights.
    """
    if prior == _NOISE:
        return {}
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, LearnedNoise)]
    return {
        f"{path}.{name}".lstrip("."): _NOISE
        for path, layer in layers
        for name, _ in layer.named_parameters()
    }


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

    @functools.cached_property
    def own_priors(self) -> dict[str, Prior]:
        """By name, the prior of parameters that do not have that of the weights."""
        return own_priors(self.model, self.prior)

    def prior_of(self, name: str) -> Prior:
        """Return the prior of a parameter."""
        return self.own_priors.get(name, self.prior)

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

    def read(self, names: Iterable[str]) -> set[str]:
        """Return the names in a checkpoint that `resumed` reads; a run of others is refused."""
        return set(names)

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
            f"bands are too narrow, most of all at a small epsilon; the estimators' default "
            f"method, SGD(inputs=...) and NoiseAware include both",
        )

    def public(self) -> tuple[str, ...]:
        """Return what the guarantee takes for public beside n and the settings.

        These are `inputs` that a user gave. An attribute `released` of the function says that it
        draws them from releases; then they are covered.
        """
        inputs = getattr(self, "inputs", None)
        if inputs is None or getattr(inputs, "released", False):
            return ()
        return ("the inputs that the method's function `inputs` returns",)

    def settings(self) -> dict[str, Any]:
        """Return the settings as plain values, for manifests and reports."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = (int, float, str, bool, type(None))
        return {
            "method": self.name,
            **{k: v if isinstance(v, plain) else name_of(v) for k, v in values.items()},
        }


def name_of(value: Any) -> str:
    """Return a name that is the same in another process."""
    if isinstance(value, functools.partial):
        return f"partial({name_of(value.func)}, {value.args}, {value.keywords})"
    return getattr(value, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
