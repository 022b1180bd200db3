"""Private statistics: the release of counts on a public grid, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpbnn.data.histograms import CERTAIN, Bounds, Histograms, check_rule, checked_levels
from dpbnn.messages import as_numbers, unquoted
from dpbnn.privacy.gate import Gate
from dpbnn.privacy.ledger import Ledger
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.plan import Plan, plan
from dpbnn.privacy.relation import check_same
from dpbnn.privacy.sampling import FullBatch

__all__ = [
    "Bounds",
    "Histograms",
    "private_bounds",
    "private_counts",
    "private_quantiles",
    "share",
    "signed_log_grid",
]

_ROWS = 8192  # records counted at once


def private_counts(
    x: Any,
    grid: Any = None,
    *,
    plan: Plan | None = None,
    noise_multiplier: float | None = None,
    ledger: Ledger | None = None,
    noise: NoiseSource | None = None,
    label: str = "private statistics",
) -> Histograms:
    """Release how many records fall into each cell of a public grid, for all columns at once.

        release = sum_i onehot(cells of record i) + N(0, sigma^2 p),  p columns

    **Guarantee.** One release by the gate. A record adds one count per column, a vector of norm
    sqrt(p) at most, which is the clip. Values that are not finite, and cells of an array of
    objects that are no numbers, add nothing. The ledger is charged before the counts are formed.

    Args:
        x: numbers [records, columns]; a memory-mapped array is read in chunks.
        grid: rising public edges, one list for all columns or [columns, edges]; by default
            `signed_log_grid()`.
        plan: of one full-batch release, such as the first of `share(...)`; needed under add/remove,
            where it says n.
        noise_multiplier: sigma, where there is no plan.
        ledger: where the release is recorded; one in memory by default.
        noise: the source of noise; a new one from operating-system entropy by default.
        label: what the release is for, in the ledger and the statement.
    """
    x = _matrix(x)
    n, columns = _size(x, plan, ledger), x.shape[1]
    edges = _edges(grid, columns)
    sigma = _sigma(plan, noise_multiplier, n)
    if plan is not None and ledger is None:
        ledger = Ledger(relation=plan.relation)
    if plan is not None and ledger is not None:
        check_same(plan.relation, ledger.relation)
    gate = Gate(math.sqrt(columns), sigma, FullBatch(n), ledger, noise=noise, label=label)
    release = gate(_Cells(x, edges), records=torch.arange(len(x)))["counts"]
    return Histograms(
        edges=edges,
        counts=release.reshape(columns, -1).numpy(),
        noise_std=sigma * gate.clip,
        n=n,
        event=FullBatch(n).event(sigma),
    )


def private_quantiles(x: Any, q: Any, grid: Any = None, **arguments: Any) -> np.ndarray:
    """Return private quantiles [len(q), columns]; see `private_counts` for the arguments.

    **Guarantee.** That of `private_counts`: one release, and post-processing.
    """
    levels = checked_levels(q)
    return private_counts(x, grid, **arguments).quantiles(levels)


def private_bounds(
    x: Any,
    *,
    range: tuple[Any, Any] | None = None,
    cells: int = 64,
    tail: float = 0.005,
    beta: float = 0.1,
    **arguments: Any,
) -> Bounds:
    """Return private bounds of every column: the lower ones, and the upper ones.

    **Guarantee.** That of `private_counts`: one release, and post-processing. A table that is too
    small for the noise is refused before anything is spent.

    Args:
        x: numbers [records, columns].
        range: public (lowest, highest) that values can have at all, numbers or one per column; by
            default a grid of powers of ten up to 1e9 on both sides.
        cells: number of cells that the range is cut into.
        tail: share of the values that a cell beyond the bounds may hold.
        beta: probability that noise widens the bounds of a column.
        **arguments: plan or noise_multiplier, ledger, noise and label, as in `private_counts`.
    """
    check_rule(tail, beta)
    x = _matrix(x)
    n, columns = _size(x, arguments.get("plan"), arguments.get("ledger")), x.shape[1]
    grid = signed_log_grid() if range is None else _even(range, cells, columns)
    sigma = _sigma(arguments.get("plan"), arguments.get("noise_multiplier"), n)
    needed = CERTAIN * sigma * math.sqrt(columns)
    if needed > n / 2:
        raise ValueError(
            f"n={n}: too few records for private bounds of {columns} "
            f"column{'s' * (columns != 1)} at noise multiplier {sigma:.3g}: noise alone can look "
            f"like {needed:.0f} records; state public bounds, or give statistics a larger share of "
            f"the budget"
        )
    return private_counts(x, grid, **arguments).bounds(tail, beta)


def signed_log_grid(
    smallest: float = 1e-3, largest: float = 1e9, per_decade: int = 4
) -> np.ndarray:
    """Return edges at powers of ten on both sides of zero, for columns of unknown scale.

    Args:
        smallest: edge of the cell around zero.
        largest: outermost edge.
        per_decade: cells from one power of ten to the next.
    """
    if not 0 < smallest < largest < math.inf:
        raise ValueError(f"smallest={smallest}, largest={largest}: must rise and be above 0")
    decades = math.log10(largest / smallest)
    positive = np.geomspace(smallest, largest, 1 + math.ceil(decades * per_decade))
    return np.concatenate([-positive[::-1], positive])


def share(fraction: float, **arguments: Any) -> tuple[Plan, Plan]:
    """Split a budget between private statistics and training.

    **Guarantee.** Both together cost at most (epsilon, delta): the second plan has the first
    beside it, and is solved for jointly. Give `fit` the ledger of the statistics, or
    it charges them again. The statistics alone cost fraction * epsilon.

    Args:
        fraction: share of epsilon that the statistics would cost alone; training loses less than
            that, since composition is tighter than adding epsilons.
        **arguments: epsilon, delta, n and the rest that `dpbnn.plan` takes for the training.

    Example:
        >>> statistics, training = share(
        ...     0.1, epsilon=1.0, delta=1e-5, n=10_000, batch_size=100, epochs=5)
        >>> statistics.steps, training.epsilon <= 1.0
        (1, True)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}: must lie in (0, 1), such as 0.1")
    missing = [name for name in ("epsilon", "delta", "n") if arguments.get(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: missing; a share is a share of a budget")
    joint = {k: v for k, v in arguments.items() if k in ("delta", "n", "relation", "accountant")}
    statistics = plan(
        epsilon=fraction * arguments["epsilon"], sampling="full-batch", steps=1, **joint
    )
    beside = (*arguments.pop("beside", ()), statistics)
    return statistics, plan(**arguments, beside=beside)


class _Cells:
    """One count per record and column, as contributions to the gate."""

    dtype = summed_in = torch.float64

    def __init__(self, x: Any, edges: np.ndarray) -> None:
        self._x, self._edges = x, edges
        self.batch_size = len(x)
        self.cells = edges.shape[1] - 1
        self.shapes: Mapping[str, torch.Size] = {
            "counts": torch.Size([edges.shape[0] * self.cells])
        }
        self.device = torch.device("cpu")

    def sum_error(self, rows: int) -> float:
        """Return e: sums of `rows` contributions of norm <= C, by chunks, err by e C at most."""
        return rows * (min(rows, _ROWS) + rows / _ROWS) * 2.0**-53

    def squared_norms(self) -> dict[str, Tensor]:
        """Return the number of counts of every record."""
        return {"counts": self._values().isfinite().sum(1).double()}

    def norms(self) -> Tensor:
        """Return the root of that number."""
        return self.squared_norms()["counts"].sqrt()

    def weighted_sum(self, w: Any) -> dict[str, Tensor]:
        """Return the weighted counts."""
        weights = w["counts"] if isinstance(w, Mapping) else w
        values = self._values()
        inner = torch.from_numpy(self._edges[:, 1:-1]).contiguous()
        cell = torch.searchsorted(inner, values.T.contiguous(), right=True).T
        index = cell + self.cells * torch.arange(values.shape[1])
        counted = weights.double()[:, None] * values.isfinite()
        total = torch.zeros(self.shapes["counts"], dtype=torch.float64)
        return {"counts": total.index_add_(0, index.flatten(), counted.flatten())}

    def chunks(self) -> Iterator[_Cells]:
        """Yield the counts of a few thousand records at a time."""
        for first in range(0, max(1, self.batch_size), _ROWS):
            yield _Cells(self._x[first : first + _ROWS], self._edges)

    def _values(self) -> Tensor:
        return torch.from_numpy(np.array(self._x, dtype=np.float64))


def _matrix(x: Any) -> Any:
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    with unquoted("x: cannot be read as an array", "give numbers [records, columns]", ValueError):
        x = x if isinstance(x, np.ndarray) else np.asarray(x)
        x = as_numbers(x) if x.dtype.kind == "O" else x
    if x.ndim != 2 or x.dtype.kind not in "biuf" or not x.shape[1]:
        raise ValueError(
            f"x: has a shape of {x.ndim} axes and type {x.dtype}; give numbers [records, columns]"
        )
    return x


def _size(x: Any, plan: Plan | None, ledger: Ledger | None) -> int:
    """Return the public number of records: that of x, or under add/remove the plan's."""
    book = plan or ledger
    if book is not None and not book.relation.public_size:
        if plan is None:
            raise ValueError(
                "plan: missing; under add/remove the number of records is not public; state an "
                "expected one, plan=dpbnn.plan(n=..., sampling='full-batch', steps=1, "
                "relation='add/remove', ...)"
            )
        return plan.n
    if not len(x):
        raise ValueError(f"x: has shape {x.shape}; give at least one record")
    return len(x)


def _edges(grid: Any, columns: int) -> np.ndarray:
    edges = np.asarray(signed_log_grid() if grid is None else grid, dtype=np.float64)
    if edges.ndim == 1:
        edges = np.broadcast_to(edges, (columns, len(edges)))
    if (
        edges.ndim != 2
        or len(edges) != columns
        or edges.shape[1] < 2
        or not np.isfinite(edges).all()
        or not (np.diff(edges, axis=1) > 0).all()
    ):
        raise ValueError(
            f"grid: must be rising finite edges, one list or one per column ({columns}); got shape "
            f"{edges.shape}"
        )
    return np.array(edges)


def _even(range: tuple[Any, Any], cells: int, columns: int) -> np.ndarray:
    low, high = (np.broadcast_to(np.asarray(end, dtype=np.float64), columns) for end in range)
    if cells < 2 or not (low < high).all():
        raise ValueError(
            f"range={range}, cells={cells}: must be (lowest, highest) and at least 2 cells"
        )
    return np.linspace(low, high, cells + 1, axis=1)


def _sigma(plan: Plan | None, noise_multiplier: float | None, n: int) -> float:
    if (plan is None) == (noise_multiplier is None):
        raise ValueError("plan, noise_multiplier: give one of the two; see dpbnn.data.share")
    if plan is None:
        return float(noise_multiplier or 0.0)
    if plan.sampling != "full-batch" or plan.steps != 1 or plan.n != n:
        raise ValueError(
            f"plan: has {plan.steps} {plan.sampling} releases for n={plan.n}; statistics of {n} "
            f"records need dpbnn.plan(sampling='full-batch', steps=1, n={n}, ...)"
        )
    return plan.noise_multiplier
