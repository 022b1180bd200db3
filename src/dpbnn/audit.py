"""Audits: what a release does when one record changes, and what else changes with it.

An audit makes its own way to release, an `Auditor`, and gives it to the gates that run, those of
`fit` or of a user's own function, by standing in front of `Gate`. It charges no ledger; every
ledger that it meets says "not private" from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import math
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import sources
from dpbnn.likelihoods import Likelihood
from dpbnn.methods.method import Method
from dpbnn.neighbours import owned, parts_of, removed, without
from dpbnn.posteriors import Posterior
from dpbnn.priors import Prior
from dpbnn.privacy import noise
from dpbnn.privacy import plan as plans
from dpbnn.privacy.checks import quoted
from dpbnn.privacy.events import Event
from dpbnn.privacy.gate import Auditor, Gate
from dpbnn.privacy.module_state import described, differing
from dpbnn.privacy.plan import Plan
from dpbnn.privacy.sampling import Sampler
from dpbnn.sources import opened, rows_of_arrays
from dpbnn.training import fit
from dpbnn.units import numbered

_STEPS = 4
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
    method_or_function: Method | Callable[[Any], Any],
    data: Any,
    neighbour: Any,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    likelihood: str | Likelihood = "categorical",
    prior: Prior | None = None,
    plan: Plan | None = None,
    units: Any = None,
    seed: int = 0,
    trace: bool = True,
) -> Replay:
    """Run a function, or `fit` with a method, on a dataset and on a neighbour, and compare.

    Both runs have the same random numbers (torch, numpy, random, the samplers' batches). The second
    run gets the releases of the first, so whatever it does with them must come out the same: what
    still differs has seen the data by another way than the gate.

    **Guarantee.** Compared are the sums before the noise, release by release; the number, kind and
    order of releases; what the function returns, bit by bit and with everything that it holds
    (attributes of modules, lists, closures, class attributes), or all of a method's posterior; and
    with `trace` the sequence of calls of Python functions outside installed packages (and inside
    dpbnn). No ledger is charged. The result holds raw distances: it is for the data holder, not for
    publication.

    A method is replayed as `fit` runs it. Record `neighbour` is zeroed out for it by
    `on_bad_rows="zero"`: it is not there in the second run, so that a method in which examples
    reach into each other's contributions is found out as well. Under an add/remove plan the record
    comes last in the first run, and the second has one row less.

    Args:
        method_or_function: a method's settings, such as `dpbnn.SGD()` or one's own `Method`; or a
            function that takes a dataset, releases through gates and returns whatever it makes
            public. Either is run three times with `trace`, twice without.
        data: a dataset; for a method what `fit` takes.
        neighbour: the index of the record to zero out or remove; or the neighbouring dataset, which
            may differ by a whole record where the relation is replace-one. A function must tell the
            gate which records a batch holds to have one zeroed out (`gate(c, records=batch)`).
        model: the network of a method.
        likelihood: of a method; see `fit`.
        prior: of a method; see `fit`.
        plan: of a method; four releases of all records by default.
        units: of a method; whose record each one is, see `fit`. All records of the person whose
            record `neighbour` is are zeroed out or removed.
        seed: of the random numbers that are no noise.
        trace: compare the calls.

    Example:
        >>> import dpbnn
        >>> def mean(values):
        ...     gate = dpbnn.Gate(clip=1.0, noise_multiplier=2.0)
        ...     return gate(dpbnn.DenseContributions(values))["value"] / len(values)
        >>> replay(mean, torch.ones(5, 3), torch.zeros(5, 3)).worst > 1
        True
        >>> other = torch.ones(5, 3)
        >>> other[0] = 0
        >>> replay(mean, torch.ones(5, 3), other).passed
        True
        >>> data = torch.randn(20, 2), torch.arange(20) % 3
        >>> found = replay(dpbnn.SGD(clip=0.5), data, 7, model=dpbnn.mlp(2, (4,), 3))
        >>> found.passed, len(found.distances), found.sensitivities[0]
        (True, 4, 0.5)
    """
    if not isinstance(method_or_function, Method):
        if not callable(method_or_function):
            raise ValueError(
                f"{quoted(method_or_function)}: must be a function of a dataset, or a method's "
                f"settings such as dpbnn.SGD()"
            )
        return _replayed(method_or_function, data, neighbour, seed, trace)
    if model is None:
        raise ValueError(
            f"model: missing; {type(method_or_function).__name__} needs a network, as in "
            f"model=dpbnn.mlp(2, (4,), 3)"
        )
    method, network = method_or_function, model
    record = neighbour if isinstance(neighbour, int) and not isinstance(neighbour, bool) else None
    arrays = rows_of_arrays(data)
    if units is not None:
        n = int(numbered(units)[0].max()) + 1
    else:
        n = len(parts_of(data, record)[0]) if arrays else len(opened(data, "zero"))
    chosen = plan or plans.plan(
        noise_multiplier=1.0, delta=1e-5, n=n, sampling="full-batch", steps=_STEPS
    )

    def trained(given: tuple[Any, Any]) -> dict[str, Any]:
        posterior = fit(
            network, given[0], likelihood, prior, method, chosen, seed=seed, on_bad_rows="zero",
            progress=False, units=given[1],
        )  # fmt: skip
        return _public(posterior)

    if record is None:
        return _replayed(trained, (data, units), (neighbour, units), seed, trace)
    if not arrays:
        pair = [(sources.without(data, left), units) for left in (None, record)]
        return _replayed(trained, *pair, seed, trace)
    own = owned(units, record)
    if not chosen.relation.public_size:
        return _replayed(trained, *removed(data, own, units), seed, trace)
    rest = without(data, own, likelihood)
    if rest is None:  # the gate itself leaves the record out, or the unit, by its number
        masked = record if units is None else int(numbered(units)[0][record])
        return _replayed(trained, (data, units), masked, seed, trace)
    return _replayed(trained, (data, units), (rest, units), seed, trace)


def _replayed(
    run: Callable[[Any], Any], data: Any, neighbour: Any, seed: int, trace: bool
) -> Replay:
    """Run on the data and on the neighbour, each with an auditor, and compare everything."""
    masked = neighbour if isinstance(neighbour, int) and not isinstance(neighbour, bool) else None
    key = hashlib.blake2b(str(seed).encode(), person=b"dpbnn replay").digest()
    if trace:  # once before, so that what is done only the first time shows in no trace
        with _seeded(seed), _gates_of(_Auditor(key)):
            run(data)
    first = _Auditor(key)
    with _seeded(seed), _gates_of(first), _traced(trace) as first_calls:
        first_result = run(data)
    second = _Auditor(key, first, masked)
    with _seeded(seed), _gates_of(second), _traced(trace) as second_calls:
        second_result = run(data if masked is not None else neighbour)

    differences = [*second.differences]
    if second.count < first.count:
        differences.append(f"{first.count} releases on the data, {second.count} on the neighbour")
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
    """One release of the run on the data: its kind, its sums and what stood for it."""

    kind: tuple[Any, ...]
    sums: dict[str, Tensor]
    release: dict[str, Tensor]


class _Auditor:
    """Keeps the releases of a run on the data, or answers with them a run on the neighbour.

    Args:
        sampling_key: of all batches.
        first: the auditor of the run on the data; None in that run itself.
        masked: the record that the second run is to leave out.
    """

    def __init__(
        self, sampling_key: bytes, first: _Auditor | None = None, masked: int | None = None
    ) -> None:
        self.sampling_key, self._first, self._masked = sampling_key, first, masked
        self.releases: list[_Release] = []
        self.count = 0
        self.found = False
        self.distances: list[float] = []
        self.sensitivities: list[float] = []
        self.differences: list[str] = []

    def keep(self, records: Tensor | None, count: int) -> Tensor | None:
        """Return which examples take part: all but the record to leave out, if they are named."""
        if records is None or self._masked is None:
            return None if records is None else torch.ones(count, dtype=torch.bool)
        if len(records) != count:
            raise ValueError(f"records: has {len(records)} entries for a batch of {count}")
        inside = records == self._masked
        self.found = self.found or bool(inside.any())
        return ~inside

    def release(self, gate: Gate, event: Event, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the release of the run on the data, made now or before."""
        shapes = tuple((name, tuple(value.shape)) for name, value in sums.items())
        what = dataclasses.replace(event, order="")
        kind = (gate.label, gate.clip, gate.sensitivity, what, shapes)
        self.count += 1
        if self._first is None:
            kept = {name: value.clone() for name, value in sums.items()}
            made = gate._noised(sums, event.noise_multiplier)
            copy = {name: value.clone() for name, value in made.items()}
            self.releases.append(_Release(kind, kept, copy))
            return made
        known = self._first.releases[self.count - 1 : self.count]
        if not known or known[0].kind != kind:
            self.differences.append(f"release {self.count - 1} is of another kind than on the data")
            return gate._noised(sums, event.noise_multiplier)
        distance = _distance(known[0].sums, sums)
        if gate.slices is not None:  # each rank has the distance of its own rows
            ranks = gate.group.gather(torch.tensor([distance], dtype=torch.float64))
            distance = float(ranks.norm())
        self.distances.append(distance)
        self.sensitivities.append(gate.sensitivity)
        return {name: value.clone() for name, value in known[0].release.items()}


def _distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    squares = sum(float((first[n].double() - second[n].double()).square().sum()) for n in first)
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


_HERE = threading.local()  # the auditor of this thread's gates, while it replays a function
_INSTALLING = threading.Lock()
_installed: list[tuple[type, str, Any]] = []
_replays = 0


@contextlib.contextmanager
def _gates_of(auditor: Auditor) -> Iterator[None]:
    """Make this thread's gates and samplers the audit's, whoever made them, while a function runs.

    While any thread is in here, the methods of `Gate` and `Sampler` that are named here look for
    the auditor of their thread. A thread without one releases as ever.
    """
    global _replays
    with _INSTALLING:
        _replays += 1
        if _replays == 1:
            for kind, name, made in (
                (Gate, "__call__", _audited), (Gate, "reserve", _audited),
                (Gate, "audited", _audited),
                (Sampler, "batches", _frozen),
            ):  # fmt: skip
                original = getattr(kind, name)
                _installed.append((kind, name, original))
                setattr(kind, name, made(original))
    before, _HERE.auditor = _auditor(), auditor
    try:
        yield
    finally:
        _HERE.auditor = before
        with _INSTALLING:
            _replays -= 1
            while not _replays and _installed:
                setattr(*_installed.pop())


def _auditor() -> Auditor | None:
    return getattr(_HERE, "auditor", None)


def _audited(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of `Gate` that runs with the auditor of its thread, where there is one."""

    @functools.wraps(original)
    def call(gate: Gate, *args: Any, **options: Any) -> Any:
        with gate._mine():  # so that no other thread meets the auditor
            before, gate._auditor = gate._auditor, _auditor() or gate._auditor
            try:
                return original(gate, *args, **options)
            finally:
                gate._auditor = before

    return call


def _frozen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Sampler.batches`, with the same key in all runs of a replay."""

    @functools.wraps(original)
    def batches(sampler: Sampler, *args: Any, **options: Any) -> Any:
        auditor = _auditor()
        if auditor is not None:
            options["key"] = auditor.sampling_key
        return original(sampler, *args, **options)

    return batches


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Freeze all random numbers but the noise and the batches; give the generators back."""
    import numpy as np

    states = (torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        random.setstate(states[2])


@contextlib.contextmanager
def _traced(wanted: bool) -> Iterator[Any]:
    """Hash the names of the Python functions called.

    Left out are those of installed packages, and what the auditors and the noise do themselves.
    """
    calls = hashlib.sha256()
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    here = str(Path(__file__).parent)
    depth = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if file == noise.__file__ or (file == __file__ and name.startswith("_Auditor.")):
            depth = max(0, depth + {"call": 1, "return": -1}.get(event, 0))
        elif depth == 0 and event == "call":
            if file.startswith(("<", *installed)) and not file.startswith(here):
                return
            calls.update(f"{file}:{name}\n".encode())

    before, collecting = sys.getprofile(), wanted and gc.isenabled()
    if wanted:
        gc.disable()  # it would end what others left open, by calls at any time
        sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()


def _compare(first: Any, second: Any) -> list[str]:
    """Name every place where two results differ, in whatever they hold; values are not quoted."""
    one, two = described(result=first), described(result=second)
    return [
        f"{path} differs"
        if path in one and path in two
        else f"{path} appears in only one of the two runs"
        for path in differing(one, two)
    ]


def _public(posterior: Posterior) -> dict[str, Any]:
    """Return everything that a posterior makes public."""
    parts = {
        name: value.read(list(range(len(value)))) if hasattr(value, "read") else value
        for name, value in posterior._parts().items()
    }
    return {
        "model": posterior.model,
        "parts": parts,
        "likelihood": posterior.likelihood,
        "settings": posterior.settings,
        "privacy": posterior.privacy.to_dict(),
    }
