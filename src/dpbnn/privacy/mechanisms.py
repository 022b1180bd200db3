"""Mechanisms: what noise a release gets, and what dp-accounting calls it.

A new mechanism is one class here or elsewhere: its name, its noise, its event, and `@register`. The
gate, the ledger, the accountants and the statement take it from there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dpbnn.privacy.relation import Relation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dpbnn.privacy.events import Event
    from dpbnn.privacy.noise import NoiseSource

__all__ = ["GaussianNoise", "Mechanism", "register"]

MECHANISMS: dict[str, type[Mechanism]] = {}
"""Every mechanism that ledgers, plans and statements can name."""

_Kind = TypeVar("_Kind", bound="type[Mechanism]")


def register(kind: _Kind) -> _Kind:
    """Make a mechanism known by its name; a decorator of the class."""
    if kind.gaussian and overridden(kind, "gaussian"):
        raise ValueError(
            f"mechanism {kind.name!r}: has a dp_event of its own and takes gaussian=True from its "
            f"parent, whose closed forms would be used instead; say gaussian = False"
        )
    if MECHANISMS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"mechanism {kind.name!r}: is registered already; choose another name")
    return kind


@dataclasses.dataclass(frozen=True)
class Mechanism(ABC):
    """Noise on a sum whose neighbours are one clip apart, or two under replace-one.

    Fields that a subclass adds are public parameters, numbers or texts. They are part of the event.

    Attributes:
        noise_multiplier: scale of the noise in units of the clip; 0 is no noise and not private.
        name: what events, ledgers and statements call it.
        words: how a statement calls the noise and its scale.
        relations: neighbouring relations that the analysis covers.
        gaussian: whether the noise is Gaussian and independent, so that closed forms hold.
    """

    noise_multiplier: float

    name: ClassVar[str]
    words: ClassVar[str]
    relations: ClassVar[tuple[Relation, ...]] = tuple(Relation)
    gaussian: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (0 <= self.noise_multiplier < math.inf):
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier}: must be a finite number >= 0"
            )
        object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))

    @classmethod
    def of(cls, event: Event) -> Mechanism:
        """Return the mechanism of an event of this name."""
        own = {field.name for field in dataclasses.fields(cls)}
        return cls(event.noise_multiplier, **{k: v for k, v in event.parameters if k in own})

    def on(self, event: Event) -> Event:
        """Return the event of the same releases with this noise."""
        if MECHANISMS.get(self.name) is not type(self):
            raise ValueError(
                f"mechanism={type(self).__name__}(...): is not what {self.name!r} was registered "
                f"as, so it would be accounted for as that; give it a name, and @register"
            )
        own, sigma = parameters(self, ("noise_multiplier",)), self.noise_multiplier
        if not own and (event.noise_multiplier, event.mechanism) == (sigma, self.name):
            return event
        if both := dict(own).keys() & dict(event.parameters).keys():
            raise ValueError(
                f"{', '.join(sorted(both))}: the {event.sampling} sampler and {self.name} noise "
                f"have both a parameter of this name; rename one"
            )
        own = (*event.parameters, *own)
        return dataclasses.replace(
            event, noise_multiplier=sigma, mechanism=self.name, parameters=own
        )

    def check(self, shapes: Mapping[str, torch.Size]) -> None:  # noqa: B027, most take any
        """Raise where there is no analysis of releases of these shapes."""

    @abstractmethod
    def dp_event(self, shift: float) -> Any:
        """Return dp-accounting's event of one release whose neighbours are `shift` clips apart."""

    @abstractmethod
    def add(
        self, sums: dict[str, Tensor], clip: float, dtype: torch.dtype, source: NoiseSource
    ) -> None:
        """Add the noise to the sums, in place.

        **Guarantee** to give: sum and noise are rounded to the grid of `spacing(noise_multiplier *
        clip, dtype)`, or to a finer one, before they meet; the gate takes its cost off the clip.

        Args:
            sums: float32 or float64; float64 where `dtype` is.
            clip: C.
            dtype: what the noise is to be drawn in.
            source: where all randomness comes from; one draw a release.
        """


def parameters(settings: Any, without: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a mechanism or sampler but those that every one has."""
    kind: Any = type(settings)
    return tuple((name, getattr(settings, name)) for name in _fields(kind) if name not in without)


def overridden(kind: type, claim: str) -> bool:
    """Return whether a class has another `dp_event` than the one its claim was made for."""
    first = {name: next(c for c in kind.__mro__ if name in vars(c)) for name in ("dp_event", claim)}
    return first["dp_event"] is not first[claim] and issubclass(first["dp_event"], first[claim])


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@register
@dataclasses.dataclass(frozen=True)
class GaussianNoise(Mechanism):
    """N(0, (sigma C)^2) in every coordinate, for sums of any shape; the noise of `Gate`.

    Args:
        noise_multiplier: sigma = noise std / clip.
    """

    name = "gaussian"
    words = "Gaussian noise, sigma"
    gaussian = True

    def dp_event(self, shift: float) -> Any:
        """Return a Gaussian release of noise sigma / shift."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.noise_multiplier / shift)

    def add(
        self, sums: dict[str, Tensor], clip: float, dtype: torch.dtype, source: NoiseSource
    ) -> None:
        """Add the noise on the grid of `NoiseSource`, and have the next one drawn ahead."""
        source.add(sums, self.noise_multiplier * clip, dtype)
        source.prepare(sums, dtype)
