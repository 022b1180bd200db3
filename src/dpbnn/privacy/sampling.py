"""Samplers: which records take part in a release, and the privacy event that follows from it.

A new sampler is one class, here or elsewhere: its name, the relations it allows, its batches, what
dp-accounting calls its releases, and `@register`.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dpbnn.privacy.checks import check_numbers, checked_unit
from dpbnn.privacy.keys import ratchet
from dpbnn.privacy.mechanisms import overridden, parameters
from dpbnn.privacy.relation import Relation

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dpbnn.privacy.events import Event

__all__ = ["FixedSize", "FullBatch", "Partition", "Poisson", "Sampler", "register", "sampler"]

SAMPLERS: dict[str, type[Sampler]] = {}
"""Every sampler that events, ledgers and plans can name."""

_Kind = TypeVar("_Kind", bound="type[Sampler]")


def register(kind: _Kind) -> _Kind:
    """Make a sampler known by its name; a decorator of the class."""
    if kind.participation is Participation.INDEPENDENT and Relation.REPLACE_ONE in kind.relations:
        raise ValueError(f"sampling {kind.name!r}: INDEPENDENT has no analysis under replace-one")
    if kind.participation is not Participation.OTHER and overridden(kind, "participation"):
        raise ValueError(
            f"sampling {kind.name!r}: has a dp_event of its own and takes the closed form of "
            f"{kind.participation.name} from its parent, which would be used instead; say which "
            f"participation it has, OTHER if none"
        )
    if SAMPLERS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"sampling {kind.name!r}: is registered already; choose another name")
    return kind


class Participation(enum.Enum):
    """How a record gets into releases, where there is a closed form for Gaussian noise."""

    EVERY = "every record may be in every release"
    BY_POSITION = "a record is in one release of each pass, fixed by its position"
    INDEPENDENT = "every record joins every release independently, with probability rate"
    OTHER = "what `Sampler.dp_event` says"


@dataclasses.dataclass(frozen=True)
class Sampler(ABC):
    """Draws index batches and knows the privacy event of what it draws.

    Attributes:
        n: number of records (or units), public; under add/remove the expected one.
        batch_size: expected batch size, public; what sums are divided by, never the realised size.
        unit: what is drawn, where that is not a record: a unit such as "person", whose records
            are in a batch all together or not at all. n, batch_size and batches count units.
        name: what events, ledgers and plans call it.
        words: how messages call it, by default by its name.
        relations: neighbouring relations that the analysis covers.
        participation: which closed form holds, if any.
        by_position: whether it matters which batches of the sequence were released; then events
            keep their start, and are added up only where one follows on the other.
        whole: whether the batch size must be a whole number.
        any_number: whether the data may have another number of records than n, under add/remove.
    """

    n: int
    batch_size: float
    unit: str = dataclasses.field(default="", kw_only=True)

    name: ClassVar[str]
    words: ClassVar[str] = ""
    relations: ClassVar[tuple[Relation, ...]]
    participation: ClassVar[Participation] = Participation.OTHER
    by_position: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    any_number: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(n=self.n, batch_size=self.batch_size)
        checked_unit(self.unit)
        if not (1 <= self.n < math.inf and self.n == math.floor(self.n)):
            raise ValueError(f"n={self.n}: must be a whole number >= 1, the number of records")
        if not (0 < self.batch_size <= self.n):
            raise ValueError(
                f"batch_size={self.batch_size}: must be > 0 and <= n={self.n}; "
                f"use sampling='full-batch' to take all records at once"
            )
        if int(self.batch_size) == self.batch_size:
            object.__setattr__(self, "batch_size", int(self.batch_size))
        elif self.whole:
            raise ValueError(f"batch_size={self.batch_size}: must be a whole number here")
        object.__setattr__(self, "n", int(self.n))

    @property
    def rate(self) -> float:
        """Expected share of the records in a batch."""
        return self.batch_size / self.n

    def steps(self, epochs: float) -> int:
        """Return the number of batches in `epochs` passes over the data, rounded up."""
        exact = Fraction(epochs).limit_denominator(10**6) * self.n / Fraction(self.batch_size)
        return math.ceil(exact)

    def size(self, step: int) -> int | None:
        """Return the size of batch `step`, or None where it is random."""
        return int(self.batch_size)

    def most(self, step: int) -> int:
        """Return a number of records that batch `step` does not exceed, where n is public.

        Where the size is random it does so with probability e^-32 at most (Bernstein).
        """
        size = self.size(step)
        if size is None:
            size = math.ceil(self.batch_size + 8 * math.sqrt(self.batch_size) + 64 / 3)
        return min(size, self.n)

    def event(self, noise_multiplier: float, count: int = 1, start: int = 0) -> Event:
        """Return the event of batches `start` to `start + count - 1` with Gaussian noise."""
        from dpbnn.privacy.events import Event, UnsupportedEvent

        if SAMPLERS.get(self.name, type(self)) is not type(self):
            raise UnsupportedEvent(
                f"{type(self).__name__}: would be accounted for as {self.name!r}, which is another "
                f"class; give it a name of its own and @register"
            )
        return Event(
            sampling=self.name,
            noise_multiplier=float(noise_multiplier),
            count=int(count),
            n=self.n,
            batch_size=self.batch_size,
            start=int(start) if self.by_position else 0,
            parameters=self.parameters,
        )

    @property
    def parameters(self) -> tuple[tuple[str, Any], ...]:
        """Public settings beside n and batch_size, as (name, value)."""
        return parameters(self, ("n", "batch_size", *(() if self.unit else ("unit",))))

    @classmethod
    def dp_event(cls, event: Event, noise: Any) -> Any:
        """Return dp-accounting's event of all releases of `event`, for the worst record.

        Unless they go `by_position`, the releases can be of any steps and any runs. By default
        every one of them may hold the record.

        Args:
            event: of this sampler.
            noise: dp-accounting's event of one release that holds the record for sure.
        """
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(noise, event.count)

    def batches(
        self,
        steps: int,
        *,
        start: int = 0,
        key: bytes | None = None,
        records: int | None = None,
    ) -> Iterator[torch.Tensor]:
        """Yield batches `start` to `start + steps - 1` as tensors of record indices.

        Batch t is a function of (key, t, records) alone, and the key moves on with every batch. So
        an interrupted run goes on with the batches it would have had, and its key says nothing of
        those before.

        Args:
            steps: how many batches.
            start: index of the first batch.
            key: secret of 16 to 64 bytes, that of batch `start`: `ratchet(key, start)` where `key`
                is that of batch 0; drawn from operating-system entropy by default.
            records: how many records the data has, n by default. Under add/remove that number is
                not public, so it may be any, and shows in nothing but the batches.
        """
        import numpy as np
        import torch

        if key is None:
            key = secrets.token_bytes(32)
        elif not 16 <= len(key) <= 64:
            raise ValueError(f"key: has {len(key)} bytes, must have 16 to 64")
        if records is None:
            records = self.n
        elif records != self.n and not self.any_number:
            raise ValueError(
                f"records: {self.name} sampling takes exactly n={self.n}; use 'poisson' or "
                f"'full-batch' where the number of records is not public"
            )
        for step in range(start, start + steps):
            seed = hashlib.blake2b(
                step.to_bytes(8, "big"), key=key, digest_size=32, person=b"dpbnn-sampling"
            ).digest()
            key = ratchet(key)
            generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(seed, "big")))
            yield torch.from_numpy(self._draw(step, generator, records))

    @abstractmethod
    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray: ...


@register
class Poisson(Sampler):
    """Every record joins every batch independently with probability q = batch_size / n.

    The gaps between the records of a batch are independent and geometric with success q.

    **Guarantee.** Batches are exactly Poisson: of m records (n but under add/remove) their size is
    Binomial(m, q) and, given the size, all subsets are equally likely. Whether a record joins
    depends on its position and not on m. A batch can be empty; it is a batch all the same.
    """

    name = "poisson"
    relations = (Relation.ZERO_OUT, Relation.ADD_REMOVE)
    participation = Participation.INDEPENDENT
    whole = False
    any_number = True

    @classmethod
    def dp_event(cls, event: Event, noise: Any) -> Any:
        """Return Poisson-sampled releases."""
        import dp_accounting

        return super().dp_event(event, dp_accounting.PoissonSampledDpEvent(event.rate, noise))

    def size(self, step: int) -> int | None:
        """Return None: the size is random."""
        return None

    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray:
        import numpy as np

        expected = records * self.rate
        block = 16 + int(expected + 4 * math.sqrt(expected))
        drawn, last = [], -1
        while last < records:
            gaps = np.minimum(generator.geometric(self.rate, block), records + 1)
            drawn.append(last + np.cumsum(gaps))
            last = int(drawn[-1][-1])
        batch = np.concatenate(drawn)
        return batch[: np.searchsorted(batch, records)]


@register
class FixedSize(Sampler):
    """Every batch is a uniform subset of exactly batch_size records, afresh each time."""

    name = "fixed-size"
    words = "fixed-size sampling without replacement"
    relations = (Relation.REPLACE_ONE,)

    @classmethod
    def dp_event(cls, event: Event, noise: Any) -> Any:
        """Return releases sampled without replacement."""
        import dp_accounting

        if event.batch_size != event.n:
            noise = dp_accounting.SampledWithoutReplacementDpEvent(event.n, event.batch_size, noise)
        return super().dp_event(event, noise)

    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray:
        return generator.choice(self.n, size=int(self.batch_size), replace=False, shuffle=False)


@register
class Partition(Sampler):
    """Disjoint batches fixed by position, visited in order, pass after pass.

    Batch j of a pass is the records j * batch_size ... (j + 1) * batch_size - 1; the last one may
    be smaller.

    **Guarantee.** A record takes part in one release of each pass and no order is secret, so there
    is no amplification: T passes are mu-GDP with mu = sqrt(T)/sigma under zero-out and twice that
    under replace-one (the analysis of the DP-BBB note, with its sensitivity corrected).
    """

    name = "partition"
    relations = (Relation.ZERO_OUT, Relation.REPLACE_ONE)
    participation = Participation.BY_POSITION
    by_position = True

    @classmethod
    def dp_event(cls, event: Event, noise: Any) -> Any:
        """Return the most releases that one batch can have had."""
        batches = math.ceil((event.n or 0) / (event.batch_size or 1))
        most = dataclasses.replace(event, count=math.ceil(event.count / batches))
        return super().dp_event(most, noise)

    @property
    def batches_per_pass(self) -> int:
        """Number of batches in one pass."""
        return math.ceil(self.n / self.batch_size)

    def steps(self, epochs: float) -> int:
        """Return the number of batches in `epochs` passes over the data, rounded up."""
        return math.ceil(Fraction(epochs).limit_denominator(10**6) * self.batches_per_pass)

    def size(self, step: int) -> int | None:
        """Return the size of batch `step`: the last of a pass may be smaller."""
        first = (step % self.batches_per_pass) * int(self.batch_size)
        return min(int(self.batch_size), self.n - first)

    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray:
        import numpy as np

        first = (step % self.batches_per_pass) * int(self.batch_size)
        return np.arange(first, min(first + int(self.batch_size), self.n))


@register
class FullBatch(Sampler):
    """Every batch is all records: n, but under add/remove."""

    name = "full-batch"
    relations = tuple(Relation)
    participation = Participation.EVERY
    any_number = True

    def __init__(self, n: int, batch_size: float | None = None, *, unit: str = "") -> None:
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "unit", unit)
        object.__setattr__(self, "batch_size", n if batch_size is None else batch_size)
        self.__post_init__()
        if self.batch_size != self.n:
            raise ValueError(
                f"batch_size={batch_size}: full-batch sampling takes all n={n} records; "
                f"leave batch_size out"
            )

    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray:
        import numpy as np

        return np.arange(records)


def sampler(sampling: str, n: int, batch_size: float | None = None, **parameters: Any) -> Sampler:
    """Return the sampler that `sampling` names: poisson, fixed-size, partition or full-batch."""
    known: dict[str, type[Sampler]] = {_letters(name): kind for name, kind in SAMPLERS.items()}
    known["full"] = FullBatch
    kind = known.get(_letters(sampling))
    if kind is None:
        names = ", ".join(repr(name) for name in SAMPLERS)
        raise ValueError(f"sampling={sampling!r}: must be one of {names}; the default is 'poisson'")
    if batch_size is None:
        if kind.participation is not Participation.EVERY:
            raise ValueError(
                f"batch_size: missing; {kind.name} sampling needs the expected batch size"
            )
        batch_size = n
    return kind(n, batch_size, **parameters)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", str(name).lower())
