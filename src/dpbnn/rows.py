"""The rows of the data: which of them can be used, before anything is spent."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import likelihoods
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import (
    SHOWN,
    alone,
    as_numbers,
    check_on_bad_rows,
    kind_of,
    refuse_rows,
    unquoted,
)
from dpbnn.privacy.checks import first_line
from dpbnn.units import Units

__all__ = ["Rows", "checked_rows"]

_CHUNK = 512  # rows that the network sees at once
_UNSURE = (
    "the likelihood cannot tell which targets it takes",
    "its methods `wrong` and `taken` must take all targets, and return one value for each",
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Inputs and targets on their device.

    Attributes:
        x: inputs, one row per record.
        y: targets, likewise.
        kept: false for rows that contribute nothing, under on_bad_rows="zero"; None where every
            row counts. Their inputs and targets are public stand-ins.
        units: whose records they are, where a batch takes all records of a person or none.
    """

    x: Tensor
    y: Tensor
    kept: Tensor | None = None
    units: Units | None = None

    @property
    def drawn(self) -> int:
        """Number of what batches are drawn from: records, or units."""
        return len(self.x) if self.units is None else len(self.units)

    def by_unit(self, units: Units) -> Rows:
        """Return the same rows as records of units."""
        if len(units.order) != len(self.x):
            raise ValueError("units: give one label for each record of the data")
        kept = self.kept
        if units.kept is not None:
            kept = units.kept.to(self.x.device) & (True if kept is None else kept)
        return Rows(self.x, self.y, kept, units)


def checked_rows(
    data: Any,
    network: nn.Module,
    likelihood: Likelihood,
    n: int | None,
    device: torch.device,
    on_bad_rows: str,
) -> Rows:
    """Return inputs and targets on the device, or raise before anything is spent.

    A row is bad where it is not finite, where its label is none of the classes, and where the
    network or the likelihood raises on it, as an Embedding does on an index that it does not hold.
    The last is found out by one pass over the data, which networks of the usual layers alone do
    not need. It is made by copies, so that nothing of the data stays in the network or the
    likelihood.

    Args:
        data: (inputs, targets).
        network: on its device.
        likelihood: of the targets.
        n: number of records of the plan; None where that is not the data's, under add/remove.
        device: where the rows go.
        on_bad_rows: "error", whose messages count bad rows (where n is given) and quote nothing of
            them; "show", whose messages name the rows; or "zero", under which nothing is raised for
            what a row holds (but for a kernel of the user's own that stops a GPU: that ends the
            run, unspent).
    """
    check_on_bad_rows(on_bad_rows)
    show = on_bad_rows == "show"
    network, likelihood = copy.deepcopy((network, likelihood))
    x, y = _tensors(data, n, on_bad_rows)
    if x.is_floating_point():
        x = x.to(next(network.parameters()).dtype)
    outputs = _outputs(network, x, device)
    bad = _not_finite(x).to(y.device)
    known = likelihoods.full(likelihood)
    with unquoted(*_UNSURE, ValueError):
        wrong = known.wrong(y, outputs).reshape(y.shape)
        y = known.taken(torch.where(wrong, torch.zeros_like(y), y), outputs)
    allowed = known.expected(outputs)  # always asked for: no call may depend on the rows
    expected = allowed if wrong.any() else "inputs and targets must be finite"
    bad = bad | (wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong) | _not_finite(y)
    width, columns = known.columns(outputs.shape[-1]), y.shape[1:].numel()
    if width not in (None, columns):
        raise ValueError(
            f"the targets have {columns} columns and the network predicts {width}; change "
            f"its last layer"
        )
    bad = bad.to(x.device)
    stand_in = _stand_in(network, likelihood, x, y, device)
    if on_bad_rows != "zero":
        refuse_rows(bad, expected, show=show, counted=n is not None)
        if not _usual(network, likelihood):
            failing, reason = _failing(network, likelihood, x, y, device, SHOWN, show)
            cannot = f"the network or the likelihood cannot take them ({reason})"
            refuse_rows(failing, cannot, show=show, most=SHOWN, counted=n is not None)
        return Rows(x.to(device), y.to(device))
    x, y = _filled(x, bad, 0), _filled(y, bad, stand_in)
    if not _usual(network, likelihood):
        failing, _ = _failing(network, likelihood, x, y, device, len(x))
        x, y, bad = _filled(x, failing, 0), _filled(y, failing, stand_in), bad | failing
    return Rows(x.to(device), y.to(device), ~bad.to(device))


def _tensors(data: Any, n: int | None, on_bad_rows: str) -> tuple[Tensor, Tensor]:
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise ValueError(
            f"data: is {type(data).__name__}; give a pair (inputs, targets) of tensors or arrays"
        )
    parts = []
    for name, part in zip(("inputs", "targets"), data, strict=True):
        with unquoted(
            f"data: the {name} are not numbers",
            "give a tensor or an array, or pass on_bad_rows='zero' to let rows with such cells "
            "contribute nothing",
            ValueError,
        ):
            values = as_numbers(part) if on_bad_rows == "zero" else part
            tensor = torch.as_tensor(values).detach()
        parts.append(tensor.reshape(1) if tensor.dim() == 0 else tensor)
    x, y = parts
    if n is None and len(x) != len(y):
        raise ValueError(
            "data: the numbers of inputs and targets differ; give one target for each input"
        )
    if n is not None and (len(x) != n or len(y) != n):
        raise ValueError(
            f"the plan is for n={n} records and the data has {len(x)} inputs and {len(y)} targets; "
            f"plan with n={len(x)}"
        )
    return x, y


def _outputs(network: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """Return the network's output for two public examples of the inputs' shape."""
    example = torch.zeros(2, *x.shape[1:], dtype=x.dtype, device=device)
    try:
        with _quietly(network):
            outputs = network(example)
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the network cannot take inputs of shape {tuple(x.shape[1:])} and type {x.dtype} "
            f"({first_line(error)}); reshape or convert them"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != 2:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the network returned {found} for 2 examples of shape {tuple(x.shape[1:])}; it must "
            f"return a tensor with one row per example"
        )
    return outputs


def _not_finite(values: Tensor) -> Tensor:
    """Return which rows hold NaN or infinity; a finite sum says quickly that none does."""
    if not values.is_floating_point() or values.sum().isfinite():
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return ~values.reshape(len(values), -1).isfinite().all(1)


def _filled(values: Tensor, bad: Tensor, stand_in: float) -> Tensor:
    return values.masked_fill(bad.view(-1, *[1] * (values.dim() - 1)).to(values.device), stand_in)


def _usual(network: nn.Module, likelihood: Likelihood) -> bool:
    """Say whether no value of a finite row can make a network or likelihood raise."""
    return likelihoods.full(likelihood).never_raises and all(
        type(module).__module__.startswith(("torch.nn.modules.", "dpbnn."))
        and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for module in network.modules()
    )


def _stand_in(
    network: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, device: torch.device
) -> float:
    """Return a public target that the likelihood takes, for rows that contribute nothing."""
    known = likelihoods.full(likelihood)
    if known.never_raises:
        return known.stand_ins[0]
    example = torch.zeros(2, *x.shape[1:], dtype=x.dtype, device=device)
    target = torch.zeros(2, *y.shape[1:], dtype=y.dtype, device=device)
    reason = ""
    for value in known.stand_ins:
        try:
            with _quietly(network):
                likelihood.log_prob(network(example), target.fill_(value))
        except Exception as error:
            reason = reason or first_line(error)
        else:
            return value
    raise ValueError(
        f"{type(likelihood).__name__} cannot take targets of shape {tuple(y.shape[1:])} and type "
        f"{y.dtype}, neither {' nor '.join(map(str, known.stand_ins))} ({reason}); change the "
        f"targets or the likelihood"
    )


def _failing(
    network: nn.Module,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    device: torch.device,
    most: int,
    show: bool = False,
) -> tuple[Tensor, str]:
    """Return which rows the network or the likelihood raises on, `most` at most, and why.

    What was raised may quote the rows: unless they may be shown, its type alone is returned.
    """
    bad: list[int] = []
    reasons: list[str] = []

    def search(start: int, stop: int) -> None:
        if len(bad) >= most:
            return
        try:
            outputs = network(x[start:stop].to(device))
            likelihood.log_prob(outputs, y[start:stop].to(device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            public = show or isinstance(error, _NoSuchIndex)
            reasons.append(first_line(error) if public else kind_of(error))
            if "CUDA" in first_line(error):
                which = f"rows {start} to {stop - 1}" if show else "some rows"
                alone(
                    ValueError(
                        f"the network or the likelihood fails on {which} ({reasons[-1]}); start "
                        f"again and fit with device='cpu' to find which"
                    )
                )
        else:
            return
        if stop - start == 1:
            bad.append(start)
        else:
            middle = (start + stop) // 2
            search(start, middle)
            search(middle, stop)

    with _quietly(network), _strict_embeddings(network):
        for start in range(0, len(x), _CHUNK):
            search(start, min(start + _CHUNK, len(x)))
    failing = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    failing[bad] = True
    return failing, next(iter(reasons), "")


class _NoSuchIndex(IndexError):
    """An index that an Embedding does not hold; its text is about the Embedding alone."""


@contextlib.contextmanager
def _strict_embeddings(network: nn.Module) -> Iterator[None]:
    """Let Embeddings say which indices they take; on a GPU they would end the process."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = args[0] if args else kwargs["input"]
        if ((indices < 0) | (indices >= module.num_embeddings)).any():
            raise _NoSuchIndex(f"an Embedding takes indices from 0 to {module.num_embeddings - 1}")

    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in network.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _quietly(network: nn.Module) -> Iterator[None]:
    """Let a network be evaluated without a trace in the random numbers."""
    held = [part for module in network.modules() for part in vars(module).values()]
    states = {g: g.get_state() for g in held if isinstance(g, torch.Generator)}
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    network.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)
