"""Likelihoods: log p(y | outputs) of each example, and all that depends on the kind of targets.

`fit` takes any object with `log_prob`. A likelihood that inherits from `LikelihoodBase` also says
which targets it takes and how it predicts, and it is saved and loaded by its class name. To add
one, write its class in one file.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from dpbnn.predictive import ClassPredictive, Predictive, PropagatedPredictive, RealPredictive

__all__ = [
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "LearnedNoiseGaussian",
    "Likelihood",
    "LikelihoodBase",
    "Mixture",
    "full",
    "likelihood",
    "registered",
]


@runtime_checkable
class Likelihood(Protocol):
    """Anything with a per-example log-probability."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        ...


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


@dataclass(frozen=True)
class Categorical(LikelihoodBase, name="categorical"):
    """Class labels: log p(y | f) = f_y - logsumexp(f).

    Further axes of the outputs (one label per position, classes last) are summed per example.
    """

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        scores = outputs.movedim(-1, 1) if outputs.dim() > 2 else outputs
        nll = F.cross_entropy(scores, y, reduction="none")
        return -nll.flatten(1).sum(1) if nll.dim() > 1 else -nll

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of logits [S, N, ..., K]."""
        return ClassPredictive.from_logits(outputs)

    def wrong(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return which labels are none of the classes."""
        wrong = ~((y >= 0) & (y < outputs.shape[-1]))
        return wrong | (y != y.round()) if y.is_floating_point() else wrong

    def expected(self, outputs: Tensor) -> str:
        """Return what labels must be."""
        last = outputs.shape[-1] - 1
        return f"labels must be whole numbers from 0 to {last}, the network's outputs"

    def taken(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return whole numbers."""
        return y.long()

    def identified(self, outputs: Tensor) -> Tensor:
        """Return logits of mean 0."""
        return outputs - outputs.mean(-1, keepdim=True)


@dataclass(frozen=True)
class Gaussian(LikelihoodBase, name="gaussian"):
    """Real targets: log p(y | f) = sum_k log N(y_k; f_k, noise_std^2).

    Args:
        noise_std: standard deviation of the observation noise; None lets `fit` learn it.
    """

    noise_std: float | None = 1.0

    never_raises = True

    def __post_init__(self) -> None:
        if self.noise_std is not None and not self.noise_std > 0:
            raise ValueError(f"noise_std={self.noise_std} must be positive; try noise_std=1.0.")

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        if self.noise_std is None:
            raise ValueError("noise_std=None: a learned noise needs `fit`, which adds it.")
        residual = (y.reshape(outputs.shape) - outputs).flatten(1) / self.noise_std
        constant = math.log(self.noise_std) + 0.5 * math.log(2 * math.pi)
        return -(0.5 * residual.square() + constant).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of means [S, N, D]; a last axis of 1 is dropped."""
        if self.noise_std is None:
            raise ValueError("noise_std=None: the noise is not known yet; give its noise_std.")
        means = outputs.squeeze(-1) if outputs.dim() == 3 else outputs
        return RealPredictive(means, self.noise_std**2)

    def columns(self, outputs: int) -> int:
        """Return one column an output."""
        return outputs

    def with_learned_noise(self) -> Likelihood | None:
        """Return the likelihood of means and log-variances, where the noise is not known."""
        return HeteroscedasticGaussian() if self.noise_std is None else None

    def with_noise(self, noise_std: float) -> Gaussian:
        """Return the likelihood at another noise."""
        return dataclasses.replace(self, noise_std=noise_std)

    def from_moments(self, mean: Tensor, variance: Tensor) -> Predictive | None:
        """Return one Gaussian an input, the noise added to the variance."""
        if self.noise_std is None:
            return None
        noise = self.noise_std**2
        if not torch.isfinite(variance + noise).all():
            mean, variance = mean.double(), variance.double()
        return PropagatedPredictive(mean, variance, noise)


@dataclass(frozen=True)
class HeteroscedasticGaussian(LikelihoodBase, name="heteroscedastic"):
    """Real targets whose noise the network predicts: outputs are (mean, log-variance), halves.

        log p(y | m, s) = sum_k log N(y_k; m_k, exp(s_k))

    Log-variances are kept within [-lowest, lowest], so that no example's density is unbounded.

    Args:
        lowest: bound on the absolute log-variance.
    """

    lowest: float = 12.0

    never_raises = True

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance."""
        if outputs.shape[-1] % 2:
            raise ValueError(
                f"the network has {outputs.shape[-1]} outputs, which cannot be means and "
                f"log-variances; give it twice as many outputs as targets."
            )
        mean, log_variance = outputs.chunk(2, -1)
        return mean, log_variance.clamp(-self.lowest, self.lowest)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        mean, log_variance = self.split(outputs)
        squared = (y.reshape(mean.shape) - mean).square() * torch.exp(-log_variance)
        return -0.5 * (squared + log_variance + math.log(2 * math.pi)).flatten(1).sum(1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of raw outputs [S, N, 2D]."""
        mean, log_variance = self.split(outputs)
        if mean.shape[-1] == 1:
            mean, log_variance = mean[..., 0], log_variance[..., 0]
        return RealPredictive(mean, log_variance.exp())

    def columns(self, outputs: int) -> int:
        """Return one column for each two outputs."""
        return outputs // 2


@dataclass(frozen=True)
class LearnedNoiseGaussian(HeteroscedasticGaussian, name="gaussian, learned noise"):
    """Real targets with a learned noise whose size does not scale the gradient of the mean.

    The log-probability is that of `HeteroscedasticGaussian`. The gradient by the mean is that of
    noise 1, so that a clip means the same at every noise; that by the log-variance is a tenth of
    its own, so that a target far from its mean is not clipped for the noise's sake. Both are zero
    where they would be, if the noise is the same for all inputs. It is for point estimates and
    optimizers that scale every parameter's steps, such as Adam; a sampler would follow another
    posterior.

    Args:
        lowest: bound on the absolute log-variance.
        start: log-variance at which learning begins.
    """

    start: float = 0.0

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_i | outputs_i), one number per example."""
        mean, log_variance = self.split(outputs)
        squared = (y.reshape(mean.shape) - mean).square()
        known, fixed = squared.detach(), log_variance.detach()
        log_variance = fixed + 0.1 * (log_variance - fixed)
        noise = known * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi)
        return -0.5 * (noise + squared - known).flatten(1).sum(1)

    def with_learned_noise(self) -> Likelihood:
        """Return itself: the noise is learned."""
        return self


@dataclass(frozen=True)
class Mixture(LikelihoodBase, name="mixture"):
    """Points without targets: outputs are log w_j + log p_j(x), log p(x) = logsumexp of them."""

    never_raises = True

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(x_i), one number per example; the targets are not used."""
        return outputs.logsumexp(-1)

    def predictive(self, outputs: Tensor) -> Predictive:
        """Return the predictive distribution of the components, of raw outputs [S, N, J]."""
        return ClassPredictive.from_logits(outputs)


def likelihood(name: str) -> LikelihoodBase:
    """Return the likelihood of that name: categorical, gaussian (std 1), heteroscedastic, mixture.

    The last one is for points without targets. Other names are those of the user's own classes.
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
