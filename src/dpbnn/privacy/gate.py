"""The gate: the only code that turns per-example quantities into something public."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from dpbnn.privacy.contracts import Auditor, Clippable, Replayed
from dpbnn.privacy.events import Event, check_relation
from dpbnn.privacy.fused import clip_factors
from dpbnn.privacy.group import Group, Shares
from dpbnn.privacy.ledger import Attempt, Ledger
from dpbnn.privacy.mechanisms import GaussianNoise, Mechanism
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.precision import UNKNOWN, Precision, precision_of
from dpbnn.privacy.slices import PartOfNoise, SlicedShares, Slices
from dpbnn.privacy.units import Groups, check_units, clipped_norms, row_norms, unit_norms

if TYPE_CHECKING:
    from dpbnn.privacy.sampling import Sampler
    from dpbnn.privacy.statement import PrivacyStatement

__all__ = ["Gate"]


_Rows = Tensor | None
Watcher = Callable[[Event, float, Tensor], None]
"""Told of a release after it was made: its event, the clip, a copy of the clipped norms."""


class Gate:
    """Clips per-example contributions, sums them, adds noise and records the release.

        release = Trunc(sum_i c_i min(1, C'/|c_i|)) + Floor(N(0, (sigma C)^2 I))

        C' = C (1 - sigma sqrt(d) 2^-k) / (1 + 2 e)

    **Guarantee.** Neighbouring datasets move the rounded sum by at most `sensitivity`. Exact sums
    are C' apart at most (2 C' under replace-one), since norms are never rounded down and a
    contribution that is not finite counts as zero. Each of the two computed sums errs by e C' at
    most, `sum_error` for the largest batch the sampler draws, and is then rounded to a grid of
    spacing sigma C 2^-k or less in d coordinates (k = 19, or 40 where that would take more than a
    twentieth off the clip or the release is float64; see `dpbnn.privacy.grid`). So

        C' + 2 e C' + sigma C sqrt(d) 2^-k = C,

    all of it public numbers: d from the shapes, e from the sampler and the model; without a sampler
    the number of examples is taken as public. Where the number of records is secret (add/remove)
    one row less shifts all others, sums are float64, and e is a bound for 2^20 records in a batch,
    or twice the expected number if that is more. Without noise nothing is rounded, and C' = C.

    The noise has standard deviation sigma * C in every coordinate, from a source of its own, and is
    rounded to the same grid, so that the low bits of a release show nothing more. The ledger holds
    the event of the sampler and this sigma, on disk, before the sum is even formed. So each call is
    one Gaussian release of the accounted kind, provided that the batch was drawn by `sampler`;
    without a sampler the event claims no amplification. An empty batch is released as noise.
    Threads take turns; a forked process has reserved nothing, and cannot use what its parent has.

    Where the sampler draws units, such as persons, c_i is the sum over all rows of unit i. Its norm
    counts as that of its largest row if that is more. So no row that is summed is above C', and e
    is a bound for the number of rows.

    Over several processes the group's rank 0 charges the ledger, and no rank computes anything of a
    release before it was told so; rank 0 alone adds noise, once, to the sum over all ranks. The
    others get the release. Of a sharded network each rank sums, noises and keeps its own rows, with
    its own part of one stream of noise (`dpbnn.privacy.slices`).

    With clip=inf and noise_multiplier=0 the gate is open: what passes is not private, and the
    ledger and the statement say so.

    Args:
        clip: C, for the whole contribution; or one clip per group, as a mapping from the first
            letters of parameter names: every group is clipped by itself, and C is the root of the
            sum of squares.
        noise_multiplier: sigma = noise std / C; Gaussian noise.
        sampler: what draws the batches; None claims no amplification.
        ledger: where releases are recorded; one in memory by default.
        mechanism: what noise is added, instead of noise_multiplier; Gaussian by default. The
            guarantee is then that of its own `add` and `dp_event`.
        noise: the source of noise; a new one from operating-system entropy by default.
        label: what the releases are for, in the ledger and the statement.
        step: position of the first release in the sampler's sequence, when a run is resumed.
        attempt: who makes the releases, when a run is resumed; somebody new by default. What the
            ledger holds of this very attempt is not charged again.
        watchers: get the clipped norms of every release, for the data holder's eyes; what they
            do comes after the release and reaches it in no way.
        auditor: makes the releases of an audit, which are not private; see `Auditor`.
        group: the processes that make the releases together; this one alone by default.
    """

    def __init__(
        self,
        clip: float | Mapping[str, float],
        noise_multiplier: float | None = None,
        sampler: Sampler | None = None,
        ledger: Ledger | None = None,
        *,
        mechanism: Mechanism | None = None,
        noise: NoiseSource | None = None,
        label: str = "",
        step: int = 0,
        attempt: Attempt | None = None,
        watchers: Sequence[Watcher] = (),
        auditor: Auditor | None = None,
        group: Group | None = None,
    ) -> None:
        self.group = Group() if group is None else group
        self.slices: Slices | None = None  # of this rank, while sums are spread over ranks
        if self.group.size == 1:
            self.group.check_alone()
        if attempt is not None and noise is None:
            raise ValueError("attempt: goes with its noise; pass the source that it began with")
        self.clips = dict(clip) if isinstance(clip, Mapping) else {"": float(clip)}
        for name, value in self.clips.items():
            if not value > 0:
                raise ValueError(f"clip={value}{f' of {name!r}' if name else ''}: must be > 0")
        self.clip = math.hypot(*self.clips.values())
        if not self.clips:
            raise ValueError("clip: no groups were given; give a number or one clip per group")
        if (noise_multiplier is None) == (mechanism is None):
            raise ValueError("noise_multiplier, mechanism: give one of the two, and not both")
        self.mechanism = GaussianNoise(noise_multiplier or 0.0) if mechanism is None else mechanism
        self.noise_multiplier = self._sigma(self.mechanism.noise_multiplier)
        self.sampler = sampler
        self.ledger = Ledger() if ledger is None else ledger
        self.noise = NoiseSource() if noise is None else noise
        self.label, self.step = label, step
        self._precision = Precision(1.0, torch.float32)
        self._watchers = tuple(watchers)
        self._auditor = auditor
        self._guard, self._process = threading.RLock(), os.getpid()
        self.attempt = Attempt.new() if attempt is None else attempt
        check_relation(self._event(self.noise_multiplier, 1, step), self.ledger.relation)
        self._hidden = self.noise.private
        self._reserved: deque[float] = deque()
        if attempt is not None and self.noise.private:
            own = self._event(self.noise_multiplier, 1, 0)
            self._reserved.extend(
                self.group.first(lambda: self.ledger.covered(attempt, step, self.clip, own))
            )

    @property
    def sensitivity(self) -> float:
        """Largest distance between the sums of neighbouring datasets."""
        return self.ledger.relation.shift * self.clip

    @property
    def reserved(self) -> int:
        """Number of releases that are recorded and not made yet."""
        return len(self._reserved)

    def audited(self) -> bool:
        """Whether an auditor makes the releases, which are then not private."""
        return self._auditor is not None

    def reserve(self, count: int, noise_multiplier: float | None = None) -> None:
        """Record the next `count` releases at once, so that they need no write each.

        **Guarantee.** They count as spent from now on, whether they are made or not. Noise from a
        seeded source hides nothing, and is recorded as no noise.
        """
        sigma = self._sigma(noise_multiplier)
        with self._mine():
            if self._auditor is None:
                hidden = sigma if self.noise.private else 0.0
                first = self.step + len(self._reserved)
                self.group.first(
                    lambda: self.ledger.spend(
                        self._event(hidden, count, first),
                        label=self.label, clip=self.clip, attempt=self.attempt, step=first,
                    )
                )  # fmt: skip
            else:
                self.ledger.observe()
            self._hidden = self.noise.private or (self._hidden and bool(self._reserved))
            self._reserved.extend([sigma] * count)

    def __call__(
        self,
        contributions: Clippable,
        *,
        noise_multiplier: float | None = None,
        mean: bool = False,
        keep: Tensor | None = None,
        records: Tensor | None = None,
        units: Tensor | None = None,
        most_rows: int | None = None,
    ) -> dict[str, Tensor]:
        """Release the clipped and noised sum of contributions, by name.

        Args:
            contributions: of the records of one batch, possibly none.
            noise_multiplier: sigma of this release, where a schedule changes it.
            mean: divide by the expected batch size (never by the realised one).
            keep: true or false for every example; where false it counts as zero, whatever it
                contributes. Such an example is still one of the batch.
            records: which records (or units) the examples are; read by audits only.
            units: which unit every example belongs to, in rising order, where the sampler draws
                units. A batch has all rows of a unit.
            most_rows: with units, a public number that bounds the rows of any batch; None is slow.
        """
        sigma = self._sigma(noise_multiplier)
        groups = check_units(units, contributions.batch_size, self.sampler, self._watchers)
        self._check_size(contributions.batch_size if groups is None else groups.count)
        _check_keep(keep, contributions.batch_size, self.ledger.relation.public_size)
        self._groups(contributions.shapes)
        self.mechanism.check(contributions.shapes)
        if mean and self.sampler is None:
            needs = "needs a sampler, whose expected batch size divides the sum"
            raise ValueError(f"mean=True: {needs}")
        self.slices = getattr(contributions, "slices", None)
        with self._mine():
            self._precision = self._precision_of(contributions, sigma, units, most_rows)
            if not self._reserved:
                self.reserve(1, sigma)
            elif self._auditor is not None:
                self.ledger.observe()
            elif self._hidden and not self.noise.private:
                raise ValueError(
                    "noise: the releases were reserved with private noise, and this source is "
                    "seeded; make a gate of its own for it"
                )
            if self._reserved.popleft() != sigma:
                raise ValueError(
                    f"noise_multiplier={sigma:g}: another value was reserved for this release; "
                    f"reserve in the order of use"
                )
            step, self.step = self.step, self.step + 1
            norms: list[Tensor] = []
            if self._auditor is not None:
                masked = self._auditor.keep(records, contributions.batch_size)
                if masked is not None:
                    keep = masked if keep is None else keep & masked.to(keep.device)
            sums = self._summed(contributions, keep, norms, groups)
            release: dict[str, Tensor] = {}
            if sums and self._auditor is None:
                release = self._noised(sums, sigma)
            elif sums and self._auditor is not None:
                release = self._auditor.release(self, self._event(sigma, 1, step), sums)
            if isinstance(contributions, Shares) and self.slices is None:
                release = contributions.spread(release)
            elif isinstance(contributions, Replayed):
                release = contributions.released(release)
            else:
                release = {n: value.to(contributions.dtype) for n, value in release.items()}
            if mean and self.sampler is not None:
                release = {n: value / self.sampler.batch_size for n, value in release.items()}
            for watcher in self._watchers:
                all_norms = torch.cat(norms) if norms else torch.zeros(0)
                watcher(self._event(sigma, 1, step), self.clip, all_norms)
            return release

    def statement(self, **details: Any) -> PrivacyStatement:
        """Return the statement of everything in the ledger; see `PrivacyStatement.of`."""
        source = {"randomness": self.noise.source, "debug": not self.noise.private}
        return self.ledger.statement(**{**source, **details})

    def _noised(self, sums: dict[str, Tensor], sigma: float) -> dict[str, Tensor]:
        if sigma > 0:
            drawn = self._precision.dtype
            if drawn is torch.float64:
                sums = {name: value.double() for name, value in sums.items()}
            source: Any = self.noise
            if self.slices is not None:
                source = PartOfNoise(self.noise, self.slices)
            self._mechanism(sigma).add(sums, self.clip, drawn, source)
        return sums

    def _precision_of(
        self, contributions: Clippable, sigma: float, units: _Rows = None, most: int | None = None
    ) -> Precision:
        """Return the precision of the next release; raises where there is none to be had."""
        rows = contributions.batch_size if self.sampler is None else self.sampler.most(self.step)
        if units is not None and most is not None:
            rows = most
        if not self.ledger.relation.public_size:
            rows = UNKNOWN if self.sampler is None else max(UNKNOWN, 2 * rows)
        elif units is not None and most is None:
            rows = max(UNKNOWN, rows)
        return precision_of(
            contributions, sigma, self.clips, self.clip, rows,
            public_size=self.ledger.relation.public_size, by_unit=units is not None,
        )  # fmt: skip

    def _summed(
        self,
        contributions: Clippable,
        keep: _Rows,
        norms: list[Tensor],
        units: Groups | None = None,
    ) -> dict[str, Tensor]:
        """Return the clipped sum; shares and replayed ones get the function that makes it.

        For these it depends on what is computed of the clip alone, which is their key.
        """
        if isinstance(contributions, Shares):
            if units is not None:
                raise ValueError("units: are for contributions of one process")
            if isinstance(contributions, SlicedShares):
                return contributions.total_of_rows(self._precision.step, keep, self._kept)
            sum_of = functools.partial(self._clipped_sum, norms=norms)
            return contributions.total(self._precision.step, keep, sum_of)
        if self.group.size > 1:
            raise ValueError("contributions: over several processes, give them as `Shares`")
        if not isinstance(contributions, Replayed):
            return self._clipped_sum(contributions, keep, norms, units)
        if self._watchers or not self.ledger.relation.public_size or units is not None:
            raise ValueError("replayed contributions: no norms to watch, a public size, no units")
        key = (self._precision, *self.clips.items())
        return contributions.summed(key, keep, lambda c, keep: self._clipped_sum(c, keep, norms))

    def _clipped_sum(
        self,
        contributions: Clippable,
        keep: _Rows,
        norms: list[Tensor],
        units: Groups | None = None,
    ) -> dict[str, Tensor]:
        """Return sum_i c_i min(1, C'/|c_i|) of those kept; `norms` gets all norms if watched.

        A lone chunk's sum is left as it is, several are added up in float64; where the number of
        records is secret, all are float64, so that it does not show.
        """
        total: dict[str, Tensor] = {}
        first = 0
        whole = contributions.chunks() if units is None else contributions.unit_chunks(units.of)
        for chunk in whole:
            rows, first = slice(first, first + chunk.batch_size), first + chunk.batch_size
            part = None if keep is None else keep[rows].to(chunk.device)
            own = () if units is None else (units.part(rows, part, chunk.device),)
            w = self._kept(chunk, part, *own)
            if self._watchers:
                norms.append(clipped_norms(chunk, w))
            for name, value in chunk.weighted_sum(w).items():
                total[name] = total[name].double().add_(value) if name in total else value
        if not total:
            like = torch.empty(0, dtype=contributions.dtype, device=contributions.device)
            total = {name: like.new_zeros(s) for name, s in contributions.shapes.items()}
        if not self.ledger.relation.public_size:
            total = {name: value.double() for name, value in total.items()}
        return total

    def _groups(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the released names of every group; each belongs to exactly one."""
        names = list(names)
        if self.clips.keys() == {""}:
            return {"": names}
        groups = {g: [name for name in names if name.startswith(g)] for g in self.clips}
        taken = Counter(name for own in groups.values() for name in own)
        for group, own in groups.items():
            if not own or any(taken[name] > 1 for name in own):
                raise ValueError(
                    f"clip: the group {group!r} has no parameter of its own among "
                    f"{names}; every parameter must begin with exactly one group's name"
                )
        if left := sorted(set(names) - set(taken)):
            raise ValueError(f"clip: {left} belong to no group; add a group for them")
        return groups

    def _kept(self, chunk: Clippable, keep: _Rows, *units: Groups) -> Tensor | dict[str, Tensor]:
        """Return the clip factor of every example that counts, 0 for others."""
        w = self._weights(chunk, *units)
        if keep is None:
            return w
        return w * keep if isinstance(w, Tensor) else {n: v * keep for n, v in w.items()}

    def _weights(self, chunk: Clippable, units: Groups | None = None) -> Tensor | dict[str, Tensor]:
        """Return the clip factor of every example, by released name where there are groups."""
        weights: dict[str, Tensor] = {}
        for group, own in self._groups(chunk.shapes).items():
            norms = row_norms(chunk, own) if units is None else unit_norms(chunk, units, own)
            w = clip_factors(norms, self._precision.share * self.clips[group])
            w = w if units is None else w.index_select(0, units.of)
            weights.update(dict.fromkeys(own, w))
        return w if len(self.clips) == 1 else weights

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a Gate cannot be pickled or copied: the copy would use what this one has reserved; "
            "make a new Gate on the same ledger"
        )

    def _mine(self) -> threading.RLock:
        """Return the lock of this process; one that was forked starts with nothing reserved."""
        if self._process != os.getpid():
            self._guard, self._process = threading.RLock(), os.getpid()
            self._reserved.clear()
            self.attempt = Attempt.new()
        return self._guard

    def _event(self, sigma: float, count: int, start: int) -> Event:
        draw = self.sampler
        event = draw.event(sigma, count, start) if draw else Event("full-batch", sigma, count)
        if event.partition:
            event = dataclasses.replace(event, order=self.attempt.key)
        return self._mechanism(sigma).on(event)

    def _mechanism(self, sigma: float) -> Mechanism:
        if sigma == self.mechanism.noise_multiplier:
            return self.mechanism
        return dataclasses.replace(self.mechanism, noise_multiplier=sigma)

    def _sigma(self, noise_multiplier: float | None) -> float:
        """Return sigma of a release, checked; the gate's own by default."""
        if noise_multiplier is None:
            return self.noise_multiplier
        sigma = self._mechanism(noise_multiplier).noise_multiplier
        if sigma > 0 and not math.isfinite(self.clip):
            raise ValueError(
                f"clip={self.clip}: noise is a multiple of the clip; give a finite clip, or "
                f"noise_multiplier=0 for an open gate, which is not private"
            )
        return sigma

    def _check_size(self, size: int) -> None:
        if self.sampler is None or not self.ledger.relation.public_size:
            return
        expected = self.sampler.size(self.step)
        if (expected is not None and size != expected) or size > self.sampler.n:
            wanted = "at most n" if expected is None else expected
            raise ValueError(
                f"the batch has {size} {self.sampler.unit or 'record'}s where {self.sampler.name} "
                f"sampling of n={self.sampler.n} has {wanted}; "
                f"draw batches with sampler.batches(...), or pass sampler=None to the gate"
            )


def _check_keep(keep: Tensor | None, size: int, public: bool) -> None:
    if keep is None or (keep.dtype is torch.bool and keep.shape == (size,)):
        return
    given = f"is a tensor of {keep.dtype} and shape {tuple(keep.shape)}" if public else "is wrong"
    of = f"each of {size} examples" if public else "each example"  # how many may be a secret
    raise ValueError(f"keep: {given}; give one of true or false for {of}")
