"""A private step on a GPU, captured in CUDA graphs once and replayed: the same kernels, no Python.

Two parts of a step are graphs: a batch's clipped sum, from the gather of its records on, and the
update of the method. Between them the gate adds the noise, by a kernel of its own with the key of
that release: no noise is ever part of a graph.

Batches are padded to a public capacity with rows that count as zero. What a batch has above it is
summed in smaller parts, by one replay for each of another graph; the sums are added up in float64,
as those of microbatches are. What changes from step to step lies in device memory: the records, the
parameters, the state of torch's generator. All else that a graph depends on is part of its key, so
that another value is another graph. What cannot be captured runs as it would on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.contributions import UnsupportedModel
from dpbnn.contributions.attach import refuse_changes
from dpbnn.contributions.probe import synthetic, undone
from dpbnn.contributions.recorded import NetworkContributions
from dpbnn.messages import unquoted
from dpbnn.methods.method import Process
from dpbnn.methods.state import State
from dpbnn.networks.inputs import arguments
from dpbnn.privacy.chacha import flat_views, on_device, shared_flat, triton_kernels
from dpbnn.privacy.contracts import Replayed
from dpbnn.privacy.module_state import Change
from dpbnn.privacy.sampling import Sampler
from dpbnn.privacy.writes import Writes
from dpbnn.resume import FAILED

__all__ = ["CapturedStep", "Replays", "can_be_seen"]

_EAGER = 2  # times that work runs as it is before it is captured
_GRAPHS = 8  # graphs of a run at most
_WRITES = "the network or the likelihood writes to a tensor that it keeps"
_UNSEEN = "the network does not run while one looks at its operations"
Sum = Callable[[NetworkContributions, Tensor], dict[str, Tensor]]
_AHEAD = 64  # batches that are drawn at once, and parts of them that are copied at once


class Replays:
    """Runs work as it is a few times, captures it in a CUDA graph, and from then on replays that.

    **Guarantee.** Work is replayed for the same key and the same tensors alone. Work that cannot be
    captured, draws from a generator of the CPU, or writes to a tensor that it may not write to,
    runs as it is.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._held: list[dict[int, Tensor]] = []
        self._refused = False
        self._pool: Any = None

    @property
    def count(self) -> int:
        """Number of graphs."""
        return len(self._graphs)

    def __call__(
        self,
        key: Hashable,
        work: Callable[[], Any],
        reads: Any = None,
        writes: Iterable[Tensor] | None = None,
    ) -> Any:
        """Return what `work` returns; from a graph, the tensors that it has written anew.

        Args:
            key: everything that the work depends on beside tensors.
            work: writes to tensors that exist already, or to new ones that it returns.
            reads: tensors that it reads and that may be others at another time.
            writes: all that exists and that it may write to, where it calls code of a user; None
                where it does not.
        """
        key = (key, *_places(reads))
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        if self._refused or len(self._graphs) >= _GRAPHS:
            return work()
        self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > 64:  # of keys that change with every step
            self._seen.clear()
        seen = Writes(writes or ())
        looking = seen if writes is not None else contextlib.nullcontext()
        if self._seen.get(key, 0) <= _EAGER:
            with looking:
                result = work()
            if seen.foreign:
                self._refuse(_WRITES)
            return result
        try:
            graph, result = self._captured(work, looking)
        except Exception as error:  # an error of the work itself comes again
            torch.cuda.synchronize()
            self._refuse(type(error).__name__)
            return work()
        if seen.foreign:
            self._refuse(_WRITES)
            return work()
        self._graphs[key] = graph, result
        self._held.append(seen.read)
        graph.replay()
        return result

    def _refuse(self, why: str) -> None:
        self._refused = True
        _warn(why)

    def _captured(
        self, work: Callable[[], Any], looking: contextlib.AbstractContextManager[Any]
    ) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph, before = torch.cuda.CUDAGraph(), _host_generators()
        # One pool: graphs run one after another, and what they return is held here. The capture
        # itself writes, to the state of torch's generator, so that one looks at the work alone.
        with (
            torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local"),
            looking,
        ):
            result = work()
        self._pool = graph.pool()
        if _host_generators() != before:
            raise RuntimeError("numbers were drawn on the CPU, and would be the same ever after")
        return graph, result


def _warn(why: str) -> None:
    warnings.warn(
        f"this step cannot be captured as a CUDA graph ({why}), so it runs operation by "
        f"operation, which is slower",
        RuntimeWarning,
        stacklevel=3,
    )


def can_be_seen(process: Process[Any], state: State, x: Any, y: Tensor) -> bool:
    """Return whether a step runs on made-up records while its operations are looked at, or warn.

    While they are, torch compiles nothing, and a network that has to be compiled raises an error.
    """
    made = synthetic(process.model, arguments(x), y)
    try:
        with undone(process.attached), Writes(()):
            process.contribute(process.draw(state), *made)
    except Exception:  # an error of the network itself comes again
        _warn(_UNSEEN)
        return False
    return True


def _places(reads: Any) -> Iterator[int]:
    """Yield where the tensors of mappings and lists lie."""
    if isinstance(reads, Tensor):
        yield reads.data_ptr()
    elif isinstance(reads, Mapping | list | tuple):
        for part in reads.values() if isinstance(reads, Mapping) else reads:
            if isinstance(part, Tensor):  # most are: 5 % of the host's work for a step
                yield part.data_ptr()
            else:
                yield from _places(part)


def _host_generators() -> list[bytes]:
    """Return the states of the generators that a network can draw from on the CPU."""
    _, numbers, position, *_ = np.random.get_state()  # noqa: NPY002, a network's, not ours
    own = (random.getstate(), position, numbers.tobytes())  # type: ignore[union-attr]
    return [repr(own).encode(), torch.get_rng_state().numpy().tobytes()]


class CapturedStep(Replayed):
    """The contributions of padded batches, whose clipped sums the gate has replayed.

    Args:
        process: contributes.
        state: its first state; the parameters become views of one buffer.
        like: contributions of no record at all.
        data: inputs, targets, and which records count, all on the device.
        sampler: says how large batches are.
        limit: most examples recorded at once; None is no limit.

    Attributes:
        capacity: rows of a batch that are summed at once.
        more: rows of each part of what a batch has above that.
        drawn: what the present step has drawn without the data.
        by_python: whether the last sum was made by Python, and not by a replay.
    """

    def __init__(
        self,
        process: Process[Any],
        state: State,
        like: NetworkContributions,
        data: tuple[Any, Tensor, Tensor | None],
        sampler: Sampler,
        limit: int | None = None,
    ) -> None:
        self.process, self._state, self._like = process, state, like
        self.x, self.y, self.kept = data
        self.shapes, self.device, self.dtype = like.shapes, like.device, like.dtype
        self.summed_in, self.sum_error = like.summed_in, like.sum_error
        whole = capacity(sampler, len(self.y))
        self.capacity, self.batch_size = min(whole, limit or whole), 0
        self.more = min(self.capacity, limit or _some(math.sqrt(sampler.batch_size)))
        self.replays = Replays()
        self._block = torch.full((_AHEAD, self.capacity), -1, device=self.device)
        self._row, self._rows = 0, 0
        self._at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._waiting: deque[Tensor] = deque()
        self._parts = 1
        self._sums: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}
        self._released: dict[str, Tensor] = {}
        parameters = state.parameters
        kind = next(iter(parameters.values())).dtype
        shapes = {name: p.shape for name, p in parameters.items()}
        self._flat, views = flat_views(shapes, kind, self.device)
        for name, parameter in parameters.items():
            parameter.data = views[name].copy_(parameter.data)
        self._addresses = [(p, p.data_ptr()) for p in parameters.values()]
        self._before = self._flat.clone()
        self._changed = torch.zeros((), dtype=torch.int32, device=self.device)
        self.drawn: Any = None
        self.by_python = True

    @staticmethod
    def fits(state: State, like: object) -> bool:
        """Return whether steps can be captured, as far as one can tell ahead."""
        parameters = list(state.parameters.values())
        alike = {(p.device, p.dtype) for p in parameters}
        apart = {p.untyped_storage().data_ptr() for p in parameters}
        return (
            isinstance(like, NetworkContributions)
            and like.device.type == "cuda"
            and alike == {(like.device, like.dtype)}
            and len(apart) == len(parameters)
        )

    def ahead(self, batches: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield the batches; many of them are drawn, and copied to the device, at once."""
        while block := list(itertools.islice(batches, _AHEAD)):
            for batch in block:
                self._waiting.extend(self._split(batch))
            yield from block

    def _split(self, rows: Tensor) -> Iterable[Tensor]:
        """Return the parts of a batch: the first one of the capacity, the others smaller."""
        if len(rows) <= self.capacity:
            return (rows,)
        return rows[: self.capacity], *torch.split(rows[self.capacity :], self.more)

    def _next(self) -> None:
        """Go on to the next part of a batch; many are copied to the device at once."""
        self._row += 1
        if self._row < self._rows:
            return
        parts = [self._waiting.popleft() for _ in range(min(_AHEAD, len(self._waiting)))]
        padded = np.full((len(parts), self.capacity), -1)
        for row, part in zip(padded, parts, strict=True):
            row[: len(part)] = part.numpy()
        here = torch.from_numpy(padded)
        here = here.pin_memory() if self.device.type == "cuda" else here
        self._block[: len(parts)].copy_(here, non_blocking=True)
        self._at.zero_()
        self._row, self._rows = 0, len(parts)

    def load(self, batch: Tensor, state: State) -> CapturedStep:
        """Return the contributions of the batch that `ahead` has yielded."""
        self.batch_size, self._state = len(batch), state
        self._parts = 1 + max(0, -(-(len(batch) - self.capacity) // self.more))
        return self

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """Let a replayed step draw from a seed of its own, as other steps do.

        How many numbers it draws does not depend on the batch, which is padded.
        """
        seed = int(torch.randint(2**62, ()))
        torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        yield

    def summed(
        self,
        key: Hashable,
        keep: Tensor | None,
        sum_of: Sum,
    ) -> dict[str, Tensor]:
        """Return the sum that `sum_of` makes of contributions and of which examples to keep.

        It is in the same tensors for every batch.

        Args:
            key: everything that `sum_of` depends on beside its arguments.
            keep: which examples of the batch to keep; None is all.
            sum_of: the gate's.
        """
        self.by_python = False
        masks = [None] * self._parts if keep is None else self._split(keep)
        for index, mask in enumerate(masks):
            self._next()
            if mask is not None:
                part = self._block[self._row, : len(mask)]
                part.masked_fill_(~mask.to(self.device), -1)
            if not index:
                work = functools.partial(self._sum, sum_of)
                self.drawn = self.replays(("sums", key), work, writes=self._written())
            else:
                self._more(key, sum_of, index)
        return dict(self._sums if self._parts == 1 else self._totals)

    def _more(self, key: Hashable, sum_of: Sum, index: int) -> None:
        """Add the sum of one more part of the batch, at what its first part has drawn."""
        if not self._totals:
            shapes = {name: value.shape for name, value in self._sums.items()}
            self._totals = flat_views(shapes, torch.float64, self.device)[1]
        if index == 1:
            _copy(self._totals, self._sums)
        drawn = self.drawn
        work = functools.partial(self._sum, sum_of, (drawn,))
        self.replays(("more", key), work, drawn, self._written())
        totals, sums = list(self._totals.values()), list(self._sums.values())
        whole, part = shared_flat(totals), shared_flat(sums)
        if whole is not None and part is not None:
            whole.add_(part)
        else:
            torch._foreach_add_(totals, sums)

    def released(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return noised sums in the dtype of releases, in the same tensors for every batch."""
        if all(value.dtype is self.dtype for value in sums.values()):
            return sums
        if not self._released:
            shapes = {name: value.shape for name, value in sums.items()}
            self._released = flat_views(shapes, self.dtype, self.device)[1]
        _copy(self._released, sums)
        return dict(self._released)

    def _sum(self, sum_of: Sum, drawn: tuple[Any, ...] = ()) -> Any:
        """Write the sum of one part of a batch, and return what its step has drawn.

        Args:
            sum_of: as for `summed`.
            drawn: what the first part has drawn, for the others.
        """
        self.by_python = True
        self._before.copy_(self._flat)
        padded = self._block.index_select(0, self._at)[0, : self.more if drawn else self.capacity]
        self._at += 1
        keep, records = padded >= 0, padded.clamp(min=0)
        if self.kept is not None:
            keep = keep & self.kept[records]
        if drawn:
            state = dataclasses.replace(self._state, drawn=drawn[0])
        else:
            state = self.process.draw(self._state)
        with unquoted(*FAILED, let=(UnsupportedModel,)):
            contributions = self.process.contribute(state, self.x[records], self.y[records])
        assert isinstance(contributions, NetworkContributions)
        contributions.sum_into(self._sums)
        sums = sum_of(contributions, keep)
        if not self._sums:
            found: dict[str, Tensor] = {}
            for kind in {value.dtype for value in sums.values()}:
                alike = {n: v.shape for n, v in sums.items() if v.dtype is kind}
                found |= flat_views(alike, kind, self.device)[1]
            self._sums = {name: found[name] for name in self.shapes}
        _copy(self._sums, sums)
        self._compare()
        return state.drawn

    def _written(self) -> list[Tensor]:
        """Return the tensors that `_sum` writes to."""
        return [self._before, self._at, self._changed, *self._sums.values()]

    def _compare(self) -> None:
        """Note on the device whether the network has written to its parameters."""
        one, two = self._flat.view(torch.int64), self._before.view(torch.int64)
        if self.device.type != "cuda" or triton_kernels() is None:
            self._changed |= (one != two).any()
        else:
            with on_device(self.device):
                launch = triton_kernels().differs_kernel[(-(-len(one) // 2048),)]
                launch(one, two, self._changed, len(one), BLOCK=2048)

    def check(self) -> None:
        """Raise where contributions have changed the parameters, in any step so far."""
        moved = any(p.data_ptr() != at for p, at in self._addresses)
        if moved or bool(self._changed):
            refuse_changes([Change("the network", "parameter", "weights")])


def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, in as few kernels as can be; some may be there already."""
    flats = [shared_flat([m[name] for name in targets]) for m in (targets, sources)]
    sources = {n: s for n, s in sources.items() if s.data_ptr() != targets[n].data_ptr()}
    kinds = {value.dtype for value in sources.values()}
    if len(kinds) == 1 and flats[0] is not None and flats[1] is not None:
        flats[0].copy_(flats[1])
        return
    for kind in kinds:  # torch has one kernel for all of a kind
        names = [name for name, value in sources.items() if value.dtype is kind]
        torch._foreach_copy_([targets[n] for n in names], [sources[n] for n in names])


def capacity(sampler: Sampler, size: int) -> int:
    """Return how many rows the parts of batches have: few, where most batches are one part.

    A batch of random size is taken as normal, with variance b; what counts is the number of rows
    computed on average. Only public numbers are read.
    """
    rows = float(sampler.batch_size)
    if sampler.size(0) is None:
        spread = math.sqrt(rows)
        choices = (_some(rows + i * spread / 8) for i in range(33))
        rows = min(choices, key=lambda c: c * (1 + 0.5 * math.erfc((c - rows) / spread / 2**0.5)))
    return max(1, min(_some(rows), size))


def _some(rows: float) -> int:
    """Return a number of rows that suits the device."""
    return math.ceil(rows / 8) * 8
