"""Groups of processes that `torchrun` has started, over torch.distributed.

All traffic goes through the CPU by gloo, in a group of the run's own: what a rank sends is
meant for this run, and a run that fails on one rank fails on all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpbnn.computed import digest
from dpbnn.methods.state import State, flat
from dpbnn.privacy.checks import check_one_process
from dpbnn.privacy.group import Group

__all__ = ["SHARDS", "Ranks", "check_same_state", "in_step", "joined"]

SHARDS = 4  # of a batch, for up to as many ranks: their number can change when a run is resumed
_PIECE = 1 << 24  # bytes of a file that are sent at once
T = TypeVar("T")


@dataclasses.dataclass
class Ranks(Group):
    """Several processes; see `Group` for what every method promises."""

    transport: Any = None

    def first(self, work: Callable[[], T]) -> T:
        """Let rank 0 do the work; all ranks get its result, or raise its error."""
        told: list[Any] = [None]
        if self.rank == 0:
            try:
                told = [(work(), None)]
            except Exception as error:
                told = [(None, _sendable(error))]
        dist.broadcast_object_list(told, group=self.transport, group_src=0)
        result, error = told[0]
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks on rank 0, and nothing of use on the others."""
        sent = values.cpu()
        dist.reduce(sent, group=self.transport, group_dst=0)
        return sent.to(values.device)

    def spread(self, values: Tensor) -> Tensor:
        """Return the values of rank 0, given ones of the same shape and dtype."""
        sent = values.cpu()
        dist.broadcast(sent, group=self.transport, group_src=0)
        return sent.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, rank by rank."""
        sent = values.cpu()
        found = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(found, sent, group=self.transport)
        return torch.stack(found).to(values.device)

    def scatter(self, values: Tensor) -> Tensor:
        """Return this rank's rows of the sum over ranks; all have equally many."""
        sent = values.cpu()
        own = torch.empty_like(sent[: len(sent) // self.size])
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13
        scatter(own, sent, group=self.transport)
        return own.to(values.device)

    def copy_file(self, path: Path) -> None:
        """Write the file of rank 0 to a path of every other rank's own."""
        size = self.first(lambda: path.stat().st_size)
        with path.open("rb" if self.rank == 0 else "wb") as file:
            for start in range(0, size, _PIECE):
                piece = torch.zeros(min(_PIECE, size - start), dtype=torch.uint8)
                if self.rank == 0:
                    file.readinto(piece.numpy())  # type: ignore[attr-defined]
                piece = self.spread(piece)
                if self.rank:
                    file.write(piece.numpy())

    def check_same(self, parts: Mapping[str, str]) -> None:
        """Raise on all ranks where one of them has another digest of a part than rank 0."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, dict(parts), group=self.transport)
        for rank, other in enumerate(found):
            names = [name for name in found[0] if other.get(name) != found[0][name]]
            if names or other.keys() != found[0].keys():
                raise RuntimeError(
                    f"{' and '.join(names)}: rank {rank} has something else than rank 0; call fit "
                    f"with the same arguments and data on all ranks"
                )


def check_same_state(group: Group, state: State) -> None:
    """Raise on all ranks where one bit of their states differs."""
    if group.size > 1:
        group.check_same({name: digest(part, b"") for name, part in flat(state, "state").items()})


def in_step(
    group: Group, state: State, stop: BaseException | None, alike: bool = True
) -> BaseException | None:
    """Return why to stop, if any rank has to; raise on all where their weights differ.

    Args:
        group: the ranks.
        state: after a step. The sums of its weights' bits are compared, which is quick.
        stop: why this rank has to stop, if so.
        alike: whether all ranks have all weights; otherwise each has rows of its own.
    """
    if group.size == 1:
        return stop
    sums = [_bit_sum(value) for value in state.parameters.values()] if alike else []
    ranks = group.gather(torch.stack([*sums, torch.tensor(int(stop is not None))]))
    if (ranks[:, :-1] != ranks[0, :-1]).any():
        raise RuntimeError(
            f"after step {state.steps} the ranks have different weights; start them anew, on "
            f"processors of one kind, and resume"
        )
    return stop or (KeyboardInterrupt() if ranks[:, -1].any() else None)


def _bit_sum(values: Tensor) -> Tensor:
    """Return the sum of a tensor's numbers, their bits read as whole numbers."""
    held = values.detach().cpu().contiguous()
    return held.view(torch.int32 if held.itemsize == 4 else torch.int64).sum(dtype=torch.int64)


def _sendable(error: Exception) -> Exception:
    """Return an error that all ranks can raise."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"rank 0 failed: {type(error).__name__}")
    return error


def _timeout() -> timedelta | None:
    """Return how long the default group waits on the CPU, where that can be known."""
    whole: Any = dist.group.WORLD
    cpu = torch.device("cpu")
    options = (
        getattr(whole._get_backend(cpu), "options", None) if cpu in whole._device_types else None
    )
    return getattr(options, "_timeout", None)


@contextlib.contextmanager
def joined() -> Iterator[Group]:
    """Give the group of all processes that were started together; it ends with the block.

    Under `torchrun` the default group of torch.distributed is made where there is none.
    """
    if not (dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())):
        check_one_process()
        yield Group()
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size = dist.get_world_size()
    shards = max(SHARDS, 1 << (size - 1).bit_length())
    transport = dist.new_group(backend="gloo", timeout=_timeout())
    group = Ranks(dist.get_rank(), size, shards, transport)
    del transport
    try:
        dist.barrier(group.transport)  # a rank that leaves at once would break others' connecting
        yield group
    finally:
        transport, group.transport = group.transport, None
        dist.destroy_process_group(transport)
        del transport  # the last reference: connections close, so that nobody waits for this rank
