"""Samplers: which records take part in a release, and the privacy event that follows from it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar

from dpbnn.privacy.checks import check_numbers
from dpbnn.privacy.events import Event
from dpbnn.privacy.keys import ratchet

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["FixedSize", "FullBatch", "Partition", "Poisson", "Sampler", "sampler"]


@dataclasses.dataclass(frozen=True)
class Sampler(ABC):
    """Draws index batches and knows the privacy event of what it draws.

    Attributes:
        n: number of records, public; under add/remove the expected one.
        batch_size: expected batch size, public; what sums are divided by, never the realised size.
    """

    n: int
    batch_size: float

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_numbers(n=self.n, batch_size=self.batch_size)
        if not (1 <= self.n < math.inf and self.n == math.floor(self.n)):
            raise ValueError(f"n={self.n}: must be a whole number >= 1, the number of records")
        if not (0 < self.batch_size <= self.n):
            raise ValueError(
                f"batch_size={self.batch_size}: must be > 0 and <= n={self.n}; "
                f"use sampling='full-batch' to take all records at once"
            )
        if int(self.batch_size) == self.batch_size:
            object.__setattr__(self, "batch_size", int(self.batch_size))
        elif not isinstance(self, Poisson):
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
        """Return the event of releasing batches `start` to `start + count - 1` with this noise."""
        return Event(
            sampling=self.name,
            noise_multiplier=float(noise_multiplier),
            count=int(count),
            n=self.n,
            batch_size=self.batch_size,
            start=int(start) if isinstance(self, Partition) else 0,
        )

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
        elif records != self.n and not isinstance(self, Poisson | FullBatch):
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


class Poisson(Sampler):
    """Every record joins every batch independently with probability q = batch_size / n.

    The gaps between the records of a batch are independent and geometric with success q.

    **Guarantee.** Batches are exactly Poisson: of m records (n but under add/remove) their size is
    Binomial(m, q) and, given the size, all subsets are equally likely. Whether a record joins
    depends on its position and not on m. A batch can be empty; it is a batch all the same.
    """

    name = "poisson"

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


class FixedSize(Sampler):
    """Every batch is a uniform subset of exactly batch_size records, afresh each time."""

    name = "fixed-size"

    def _draw(self, step: int, generator: np.random.Generator, records: int) -> np.ndarray:
        return generator.choice(self.n, size=int(self.batch_size), replace=False, shuffle=False)


class Partition(Sampler):
    """Disjoint batches fixed by position, visited in order, pass after pass.

    Batch j of a pass is the records j * batch_size ... (j + 1) * batch_size - 1; the last one may
    be smaller.

    **Guarantee.** A record takes part in one release of each pass and no order is secret, so there
    is no amplification: T passes are mu-GDP with mu = sqrt(T)/sigma under zero-out and twice that
    under replace-one (the analysis of the DP-BBB note, with its sensitivity corrected).
    """

    name = "partition"

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


class FullBatch(Sampler):
    """Every batch is all records: n, but under add/remove."""

    name = "full-batch"

    def __init__(self, n: int, batch_size: float | None = None) -> None:
        object.__setattr__(self, "n", n)
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


_SAMPLERS: dict[str, type[Sampler]] = {
    "poisson": Poisson,
    "fixedsize": FixedSize,
    "partition": Partition,
    "fullbatch": FullBatch,
    "full": FullBatch,
}


def sampler(sampling: str, n: int, batch_size: float | None = None) -> Sampler:
    """Return the sampler that `sampling` names: poisson, fixed-size, partition or full-batch."""
    kind = _SAMPLERS.get(re.sub(r"[^a-z]", "", str(sampling).lower()))
    if kind is None:
        names = ", ".join(repr(c.name) for c in (Poisson, FixedSize, Partition, FullBatch))
        raise ValueError(f"sampling={sampling!r}: must be one of {names}; the default is 'poisson'")
    if batch_size is None:
        if kind is not FullBatch:
            raise ValueError(
                f"batch_size: missing; {kind.name} sampling needs the expected batch size"
            )
        batch_size = n
    return kind(n, batch_size)
