"""Audits: what a release does when one record changes, and what else changes with it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import math
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dpbnn.privacy import noise
from dpbnn.privacy.events import Event
from dpbnn.privacy.gate import OBSERVER, Gate
from dpbnn.privacy.module_state import described, differing
from dpbnn.privacy.sampling import FROZEN_KEY

__all__ = ["PrivacyBug", "Replay", "replay"]

_TOLERANCE = 1e-5


class PrivacyBug(AssertionError):
    """A release moved by more than its sensitivity, or something else moved with it."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """What changed between two runs on neighbouring datasets.

    Attributes:
        distances: for every release, the distance between the two sums before the noise.
        sensitivities: for every release, what the gate declares as the largest distance.
        differences: everything else that differed, in words.
    """

    distances: tuple[float, ...]
    sensitivities: tuple[float, ...]
    differences: tuple[str, ...]

    @property
    def worst(self) -> float:
        """Largest distance in units of the sensitivity; at most 1 where the claim holds."""
        return max(
            (d / s for d, s in zip(self.distances, self.sensitivities, strict=True)), default=0.0
        )

    @property
    def passed(self) -> bool:
        """Whether every distance is within its sensitivity and nothing else differs."""
        return self.worst <= 1 + _TOLERANCE and not self.differences

    def check(self) -> Replay:
        """Return self, or raise PrivacyBug that says what is wrong."""
        problems = list(self.differences)
        if not self.worst <= 1 + _TOLERANCE:
            problems.insert(0, f"a release moved by {self.worst:.6g} times its sensitivity")
        if problems:
            raise PrivacyBug("; ".join(problems))
        return self


def replay(
    function: Callable[[Any], Any],
    data: Any,
    neighbour: Any,
    *,
    seed: int = 0,
    trace: bool = True,
) -> Replay:
    """Run `function` on a dataset and on a neighbour, and compare everything.

    **Guarantee.** That of `dpbnn.replay`, which takes methods too.

    Args:
        function: takes a dataset, releases through gates, returns whatever it makes public (states,
            parameters, numbers). Called three times with `trace`, twice without.
        data: a dataset.
        neighbour: the neighbouring dataset; or the index of the record to zero out, for functions
            that tell the gate which records a batch holds (`gate(c, records=batch)`).
        seed: of the random numbers that are no noise.
        trace: compare the calls.

    Example:
        >>> from dpbnn.contributions import DenseContributions
        >>> def mean(values):
        ...     gate = Gate(clip=1.0, noise_multiplier=2.0)
        ...     return gate(DenseContributions(values))["value"] / len(values)
        >>> replay(mean, torch.ones(5, 3), torch.zeros(5, 3)).worst > 1
        True
        >>> other = torch.ones(5, 3)
        >>> other[0] = 0
        >>> replay(mean, torch.ones(5, 3), other).passed
        True
    """
    masked = neighbour if isinstance(neighbour, int) and not isinstance(neighbour, bool) else None
    second_data = data if masked is not None else neighbour
    if trace:
        with _run(_First(), seed):
            function(data)
    first = _First()
    with _run(first, seed), _traced(trace) as first_calls:
        first_result = function(data)
    second = _Second(first.releases, masked)
    with _run(second, seed), _traced(trace) as second_calls:
        second_result = function(second_data)

    differences = [*second.differences]
    if len(second.seen) < len(first.releases):
        differences.append(
            f"{len(first.releases)} releases on the data, {len(second.seen)} on the neighbour"
        )
    if masked is not None and not second.found:
        differences.append(
            f"record {masked} was in no release; pass records= to the gate, or choose another"
        )
    differences += _compare(first_result, second_result)
    if first_calls.hexdigest() != second_calls.hexdigest():
        differences.append("the sequence of function calls differs")
    return Replay(tuple(second.distances), tuple(second.sensitivities), tuple(differences))


@dataclasses.dataclass(frozen=True)
class _Release:
    """One release of the first run: its kind, its sums and what stood for it."""

    kind: tuple[Any, ...]
    sums: dict[str, Tensor]
    release: dict[str, Tensor]


def _kind(gate: Gate, event: Event, sums: dict[str, Tensor]) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(value.shape)) for name, value in sums.items())
    return (gate.label, gate.clip, gate.sensitivity, dataclasses.replace(event, order=""), shapes)


class _First:
    """Observes the run on the data: lets releases pass and keeps them."""

    def __init__(self) -> None:
        self.releases: list[_Release] = []

    def weights(self, records: Tensor | None, count: int) -> Tensor | None:
        return None if records is None else torch.ones(count, dtype=torch.float64)

    def release(self, gate: Gate, event: Event, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {name: value.clone() for name, value in sums.items()}
        release = gate._noised(sums, event.noise_multiplier)
        copy = {name: value.clone() for name, value in release.items()}
        self.releases.append(_Release(_kind(gate, event, kept), kept, copy))
        return release


class _Second:
    """Observes the run on the neighbour: compares sums, answers with the first run's releases."""

    def __init__(self, releases: Sequence[_Release], masked: int | None) -> None:
        self._releases = releases
        self._masked = masked
        self.found = False
        self.seen: list[tuple[Any, ...]] = []
        self.distances: list[float] = []
        self.sensitivities: list[float] = []
        self.differences: list[str] = []

    def weights(self, records: Tensor | None, count: int) -> Tensor | None:
        if records is None:
            return None
        if self._masked is None:
            return torch.ones(count, dtype=torch.float64)
        if len(records) != count:
            raise ValueError(f"records: has {len(records)} entries for a batch of {count}")
        inside = records == self._masked
        self.found = self.found or bool(inside.any())
        return 1.0 - inside.double()

    def release(self, gate: Gate, event: Event, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        index = len(self.seen)
        kind = _kind(gate, event, sums)
        self.seen.append(kind)
        if index >= len(self._releases) or kind != self._releases[index].kind:
            self.differences.append(f"release {index} is of another kind than on the data")
            return gate._noised(sums, event.noise_multiplier)
        before = self._releases[index]
        self.distances.append(_distance(before.sums, sums))
        self.sensitivities.append(gate.sensitivity)
        return {name: value.clone() for name, value in before.release.items()}


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    squares = sum(float((first[n].double() - second[n].double()).square().sum()) for n in first)
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


@contextlib.contextmanager
def _run(observer: _First | _Second, seed: int) -> Iterator[None]:
    """Freeze all random numbers but the noise, and put the observer into every gate."""
    import numpy as np

    states = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002
    key = hashlib.blake2b(str(seed).encode(), person=b"dpbnn replay").digest()
    observing, freezing = OBSERVER.set(observer), FROZEN_KEY.set(key)
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        yield
    finally:
        OBSERVER.reset(observing)
        FROZEN_KEY.reset(freezing)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextlib.contextmanager
def _traced(wanted: bool) -> Iterator[Any]:
    """Hash the names of the Python functions called.

    Left out are those of installed packages, and what the audit and the noise do themselves.
    """
    calls = hashlib.sha256()
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    here = __file__.rpartition("privacy")[0]
    own = (__file__, noise.__file__)

    depth = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        file = frame.f_code.co_filename
        if file in own:
            depth = max(0, depth + {"call": 1, "return": -1}.get(event, 0))
        elif depth == 0 and event == "call":
            if file.startswith(("<", *installed)) and not file.startswith(here):
                return
            calls.update(f"{file}:{frame.f_code.co_qualname}\n".encode())

    before, collecting = sys.getprofile(), gc.isenabled()
    if wanted:
        gc.disable()  # it would end what others left open, by calls at any time
        sys.setprofile(note)
    try:
        yield calls
    finally:
        if wanted:
            sys.setprofile(before)
            if collecting:
                gc.enable()


def _compare(first: Any, second: Any) -> list[str]:
    """Name every place where two results differ, in whatever they hold; values are not quoted."""
    one, two = described(result=first), described(result=second)
    return [
        f"{path} differs" if path in one and path in two else f"{path} is there in one run alone"
        for path in differing(one, two)
    ]
