"""The rows of a run over several processes: which of them this one reads.

Either every rank has all rows, and reads its share of each batch. Or every rank has rows of its
own (`DataSource(..., owned=True)`), which no other rank sees.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from dpbnn.computed import digest
from dpbnn.privacy.group import Group
from dpbnn.rows import Rows, StreamedRows, each
from dpbnn.sources import Source, opened

__all__ = ["RankRows", "over_ranks"]

T = TypeVar("T")
Checked = Callable[[Any, int | None], Rows | StreamedRows]


@dataclasses.dataclass
class RankRows:
    """The rows of all ranks, of which this one reads those of its shards.

    Records are numbered over all ranks; those of a rank that owns rows begin at a number that
    `Group.starts` has.

    Attributes:
        rows: that this rank has.
        group: the ranks.
        identity: what tells the rows of all ranks from others.
        fixed: whether the rows of all ranks are the same when they are read again.
    """

    rows: Rows | StreamedRows
    group: Group
    identity: Any = None
    fixed: bool = True

    x: ClassVar[Any] = None  # no batch is taken but by number
    y: ClassVar[Any] = None
    kept: ClassVar[Any] = None
    units: ClassVar[Any] = None

    def __post_init__(self) -> None:
        self._read: tuple[Tensor, Any] | None = None

    @classmethod
    def of(cls, rows: Rows | StreamedRows | RankRows, group: Group) -> RankRows:
        """Return rows of which this process reads the shards that a group gives it."""
        if isinstance(rows, RankRows):
            return rows
        return cls(rows, group, rows.identity, rows.fixed)

    def __len__(self) -> int:
        return self.group.starts[-1] if self.group.starts else len(self.rows)

    @property
    def drawn(self) -> int:
        """Number of records that batches are drawn from, those of all ranks."""
        return len(self)

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        return self.rows.device

    def none(self) -> tuple[Any, Tensor]:
        """Return the inputs and targets of no record at all."""
        return self.rows.none()

    def check_batches(self, most: int) -> None:
        """Raise where batches of so many records do not fit into memory."""
        self.rows.check_batches(most)

    def _own(self, records: Tensor) -> Tensor:
        """Return which records are in shards of this rank."""
        return torch.isin(self.group.shard_of(records), torch.tensor(list(self.group.mine())))

    @property
    def _first(self) -> int:
        return self.group.starts[self.group.rank] if self.group.starts else 0

    def ahead(self, batches: Iterator[Tensor], seed: int) -> Iterator[Tensor]:
        """Yield batches, of which this rank's records are read in the meantime.

        Args:
            batches: numbers of records, those of other ranks too.
            seed: of what records draw.
        """
        whole: deque[tuple[Tensor, Tensor]] = deque()

        def own() -> Iterator[Tensor]:
            for batch in batches:
                mine = batch[self._own(batch)]
                whole.append((batch, mine))
                yield mine - self._first

        seed += self.group.rank if self.group.starts else 0
        for numbers in self.rows.ahead(own(), seed):
            batch, mine = whole.popleft()
            self._read = mine, self.rows.take(numbers)
            yield batch
        self._read = None

    def take(self, records: Tensor) -> tuple[Any, Tensor, Tensor | None]:
        """Return inputs and targets of own records of the last batch, and which of them count."""
        assert self._read is not None
        mine, (x, y, keep) = self._read
        at = torch.isin(mine, records).nonzero()[:, 0].to(y.device)
        return each(x, lambda part: part[at]), y[at], None if keep is None else keep[at]

    def keep(self, batch: Tensor) -> Tensor | None:
        """Return which records of the last batch count; those of other ranks are left as true."""
        assert self._read is not None
        counted = self._read[1][2]
        if counted is None:
            return None
        keep = torch.ones(len(batch), dtype=torch.bool, device=counted.device)
        keep[self._own(batch).to(keep.device)] = counted
        return keep


def over_ranks(
    group: Group, data: Any, n: int | None, on_bad_rows: str, check: Checked
) -> Rows | StreamedRows | RankRows:
    """Return the rows of a run, checked; where one rank refuses its data, all raise.

    **Guarantee.** Every record has one number and one owner. Where the number of records is public
    it is that of all ranks together. Rows that two ranks own alike are refused: a record of them
    would count twice.

    Args:
        group: the processes; whose rows are whose is noted there.
        data: as in `fit`.
        n: number of records of the plan; None where that is not the data's, under add/remove.
        on_bad_rows: as in `fit`.
        check: returns checked rows of this process, given its data, their number where that is
            public; with a digest, where there are several.
    """
    if group.size == 1:
        return check(data, n)
    source = _all_or_none(group, lambda: opened(data, on_bad_rows))
    counts = group.gather(torch.tensor([len(source), source.owned]))
    if (counts[:, 1] != counts[0, 1]).any():
        raise ValueError("owned: is true on some ranks alone; give owned=True on all, or on none")
    if source.owned:
        _number(group, source, counts[:, 0].tolist(), n)
    own = len(source) if source.owned and n is not None else n
    rows = _all_or_none(group, lambda: check(source, own))
    fixed = bool(group.gather(torch.tensor([rows.fixed])).all())
    identity = rows.identity
    if source.owned:
        digests = [bytes(one.tolist()).hex() for one in group.gather(_bytes(identity))]
        full = [one for one, count in zip(digests, counts[:, 0].tolist(), strict=True) if count]
        if len({*full}) < len(full):
            raise ValueError(
                "owned: two ranks own the same rows, so that a record would count twice; give "
                "every rank rows of its own, or leave owned out where all ranks have all rows"
            )
        identity = ("owned", *digests)
    return RankRows(rows, group, identity, fixed)


def _number(group: Group, source: Source, counts: list[int], n: int | None) -> None:
    """Number the records over all ranks, in the order of ranks: one shard for each rank."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    if n is not None and starts[-1] != n:
        raise ValueError(
            f"the plan is for n={n} records and the ranks own {counts}, {starts[-1]} in all; plan "
            f"with n={starts[-1]}, the records of all ranks"
        )
    group.starts, group.shards = tuple(starts), group.size
    if source.missing is not None:
        source.missing -= starts[group.rank]


def _bytes(identity: Any) -> Tensor:
    return torch.tensor(list(bytes.fromhex(digest(identity, b""))), dtype=torch.uint8)


def _all_or_none(group: Group, work: Callable[[], T]) -> T:
    """Return what the work of this rank gives; raise where that of any rank fails."""
    failure, result = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    failed = group.gather(torch.tensor([failure is not None]))[:, 0]
    if failure is not None:
        raise failure
    if failed.any():
        raise ValueError(
            f"rank {int(failed.nonzero()[0])} has refused its data, for the reason that it says "
            f"itself"
        )
    return result  # type: ignore[return-value]
