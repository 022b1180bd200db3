"""Which rows are bad: not finite, of no class, or such that the network raises on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dpbnn import likelihoods
from dpbnn.likelihoods import Likelihood
from dpbnn.messages import alone, kind_of, unquoted
from dpbnn.networks.inputs import Arguments, arguments, called, each
from dpbnn.privacy.checks import first_line
from dpbnn.sources import Block, Source

__all__ = ["Check"]

_CHUNK = 512  # rows that the network sees at once
_UNSURE = (
    "the likelihood cannot tell which targets it takes",
    "its methods `wrong` and `taken` must take all targets, and return one value for each",
)


class Check:
    """Says which records are bad, and converts the others, piece by piece.

    Args:
        network: a copy, on its device.
        likelihood: a copy.
        source: of the records.
        device: of the network.

    Attributes:
        stand_in: a public target for bad records.
        expected: what targets are allowed, in words.
    """

    def __init__(
        self, network: nn.Module, likelihood: Likelihood, source: Source, device: torch.device
    ) -> None:
        self.network, self.likelihood, self.source = network, likelihood, source
        self.device, self.dtype = device, next(network.parameters()).dtype
        self.known = likelihoods.full(likelihood)
        *inputs, target = source.parts
        self.examples = [
            torch.zeros(2, *part.shape, dtype=self._dtype(part.dtype), device=device)
            for part in inputs
        ]
        self.outputs = _outputs(network, source.x(self.examples))
        self.expected = self.known.expected(self.outputs)  # always: no call depends on the rows
        y = torch.zeros(2, *target.shape, dtype=target.dtype)
        y = self.targets(y)[0]
        width, columns = self.known.columns(self.outputs.shape[-1]), y.shape[1:].numel()
        if width not in (None, columns):
            raise ValueError(
                f"the targets have {columns} columns and the network predicts {width}; change "
                f"its last layer"
            )
        self.usual = _usual(network, likelihood)
        self.stand_in = _stand_in(network, likelihood, source.x(self.examples), y)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point else dtype

    def targets(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return targets as the likelihood takes them, and which of them it does not take."""
        with unquoted(*_UNSURE, ValueError):
            wrong = self.known.wrong(y, self.outputs).reshape(y.shape)
            y = self.known.taken(torch.where(wrong, torch.zeros_like(y), y), self.outputs)
        return y, wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong

    def clean(self, block: Block) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return inputs and targets of a piece as the network takes them, and its bad records."""
        return self.look(block)[:3]

    def look(self, block: Block) -> tuple[list[Tensor], Tensor, Tensor, bool]:
        """Return the same, and whether a target is one that the likelihood does not take."""
        *x, y = block.parts
        x = [part.to(self._dtype(part.dtype)) for part in x]
        y, wrong = self.targets(y)
        bad = wrong | _not_finite(y)
        for part in x:
            bad = bad | _not_finite(part).to(bad.device)
        if block.loaded is not None:
            bad = bad | ~block.loaded.to(bad.device)
        return x, y, bad, bool(wrong.any())

    def failing(
        self, x: list[Tensor], y: Tensor, most: int, show: bool = False
    ) -> tuple[Tensor, str]:
        """Return which rows the network or the likelihood raises on; see `_failing`."""
        inputs = arguments(self.source.x(x))
        return _failing(self.network, self.likelihood, inputs, y, self.device, most, show)


def _outputs(network: nn.Module, x: Any) -> Tensor:
    """Return the network's output for two public examples of the inputs' shape."""
    inputs = arguments(x)
    shapes = ", ".join(str(tuple(part.shape[1:])) for part in inputs)
    kinds = ", ".join(dict.fromkeys(str(part.dtype) for part in inputs))
    try:
        with _quietly(network):
            outputs = called(network, inputs)
    except (RuntimeError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the network cannot take inputs of shape {shapes} and type {kinds} "
            f"({first_line(error)}); reshape or convert them"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != 2:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the network returned {found} for 2 examples of shape {shapes}; it must "
            f"return a tensor with one row per example"
        )
    return outputs


def _not_finite(values: Tensor) -> Tensor:
    """Return which rows hold NaN or infinity; a finite sum says quickly that none does."""
    if not values.is_floating_point() or values.sum().isfinite():
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    return ~values.reshape(len(values), -1).isfinite().all(1)


def _usual(network: nn.Module, likelihood: Likelihood) -> bool:
    """Say whether no value of a finite row can make a network or likelihood raise."""
    return likelihoods.full(likelihood).never_raises and all(
        type(module).__module__.startswith(("torch.nn.modules.", "dpbnn."))
        and not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for module in network.modules()
    )


def _stand_in(network: nn.Module, likelihood: Likelihood, x: Any, y: Tensor) -> float:
    """Return a public target that the likelihood takes, for rows that contribute nothing.

    Args:
        network: a copy.
        likelihood: a copy.
        x: two public examples.
        y: targets of the right shape and type.
    """
    known = likelihoods.full(likelihood)
    if known.never_raises:
        return known.stand_ins[0]
    inputs = arguments(x)
    target = torch.zeros(2, *y.shape[1:], dtype=y.dtype, device=inputs[0].device)
    reason = ""
    for value in known.stand_ins:
        try:
            with _quietly(network):
                likelihood.log_prob(called(network, inputs), target.fill_(value))
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
    x: Arguments,
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
            outputs = called(network, each(lambda part: part[start:stop].to(device), x))
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
        for start in range(0, len(y), _CHUNK):
            search(start, min(start + _CHUNK, len(y)))
    failing = torch.zeros(len(y), dtype=torch.bool)
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
