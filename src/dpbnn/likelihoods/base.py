"""What a likelihood is, the register of likelihoods by name, and what users' own objects lack."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from dpbnn.predictive import Predictive


@runtime_checkable
class Likelihood(Protocol):
    """Anything with a per-example log-probability."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        ...


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """What targets may be, given a network's outputs at N public inputs.

    Only outputs that are logits or means have scores and slopes; those of others are 0.

    Attributes:
        targets: Q of them for every input, [Q, N, ...].
        chances: their probabilities, [Q, N].
        scores: derivative of the negative log-probability by the outputs, [Q, N, K].
        slopes: what `log_prob` hands to the network in its place, [Q, N, K].
        variance: the largest variance that a logit or a mean can have before any data.
        wider: what standard deviations of `methods/laplace.py` are multiplied by, with privacy and
            without.
    """

    targets: Tensor
    chances: Tensor
    scores: Tensor
    slopes: Tensor
    variance: float
    wider: tuple[float, float]


class LikelihoodBase(ABC):
    """A likelihood that can be named, saved and loaded, and knows its targets.

    `class Poisson(LikelihoodBase, name="poisson")` is used by `fit(..., likelihood="poisson")`. A
    likelihood that is saved with a posterior is a dataclass of JSON values.

    Attributes:
        stand_ins: public values, the first of which that `log_prob` takes stands in for the targets
            of rows that contribute nothing.
        never_raises: whether `log_prob` raises on no targets but those that are `wrong`. If it may,
            it is tried on every row before anything is spent. A subclass does not inherit it.
    """

    stand_ins: ClassVar[tuple[float, ...]] = (0,)
    never_raises: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.never_raises = bool(vars(cls).get("never_raises"))
        for key, register in ((cls.__name__, _CLASSES), (name, _NAMES)):
            if key is None or key.startswith("_"):
                continue
            known = register.get(key, cls)
            if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(
                    f"{key}: is the name of {known.__module__}.{known.__qualname__} already; give "
                    f"the likelihood another one"
                )
            register[key] = cls

    @abstractmethod
    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of raw outputs [S, N, ...]."""
        raise _unpredictive(self)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which of the targets cannot be used, shaped like y; raise on none of them.

        Args:
            y: targets, as they were given.
            outputs: of the network for two public examples.
        """
        return ~self.taken(y, outputs).isfinite()

    def expected(self, outputs: Tensor) -> str:
        """Return what targets must be, in public words."""
        return "inputs and targets must be finite"

    def taken(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return targets in the type that `log_prob` takes."""
        return y.to(outputs.dtype)

    def columns(self, outputs: int) -> int | None:
        """Return the number of target columns for so many outputs; None where any will do."""
        return None

    def with_learned_noise(self) -> Likelihood | None:
        """Return the likelihood of a network that learns its noise, where this one asks for it."""
        return None

    def with_noise(self, noise_std: float) -> LikelihoodBase | None:
        """Return the likelihood at another Gaussian noise; None where it has none."""
        return None

    def from_moments(self, mean: Tensor, variance: Tensor) -> Predictive | None:
        """Return the predictive of Gaussian outputs in closed form; None where there is none."""
        return None

    def identified(self, outputs: Tensor) -> Tensor:
        """Return outputs without what does not change the likelihood."""
        return outputs

    def outcomes(self, outputs: Tensor) -> Outcomes | None:
        """Return what targets may be at outputs [N, K] of a network; None where it is not known."""
        return None

    def locations(self, changes: Tensor) -> Tensor:
        """Return changes of logits or means, as `predictive` has them, given those of outputs."""
        return changes


_CLASSES: dict[str, type[LikelihoodBase]] = {}
_NAMES: dict[str, type[LikelihoodBase]] = {}


def _unpredictive(likelihood: object) -> TypeError:
    return TypeError(
        f"{type(likelihood).__name__} has no predictive distribution; use Categorical or "
        f"Gaussian, or give it a method predictive(outputs) that returns a Predictive."
    )


class _Plain(LikelihoodBase):
    """An object of the user's that has `log_prob` and no more, or `predictive`."""

    stand_ins = (0, 1, 0.5)

    def __init__(self, own: object) -> None:
        self.own = own

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        assert isinstance(self.own, Likelihood)
        return self.own.log_prob(outputs, y)

    def predictive(self, outputs: Tensor) -> Predictive:
        if not hasattr(self.own, "predictive"):
            raise _unpredictive(self.own)
        found: Predictive = self.own.predictive(outputs)
        return found

    def taken(self, y: Tensor, outputs: Tensor) -> Tensor:
        return y.to(outputs.dtype) if y.is_floating_point() else y


def likelihood(name: str) -> LikelihoodBase:
    """Return the likelihood of that name, such as "categorical", "bernoulli" or "poisson".

    "gaussian" has a noise of std 1, and "mixture" is for points without targets. Other names are
    those of the user's own classes.
    """
    try:
        return _NAMES[name]()
    except KeyError:
        allowed = ", ".join(map(repr, _NAMES))
        raise ValueError(
            f"likelihood={name!r} is not one of {allowed}; pass one of them."
        ) from None


def registered() -> dict[str, type[LikelihoodBase]]:
    """Return all classes of likelihoods by their names."""
    return dict(_CLASSES)


def full(likelihood: object) -> LikelihoodBase:
    """Return a likelihood with all that `LikelihoodBase` has; what it lacks is the default."""
    return likelihood if isinstance(likelihood, LikelihoodBase) else _Plain(likelihood)
