"""Bytes that a step of a network of ViT-S/16's size holds per example, counted without a GPU.

    python -m benchmarks.held [--layers 12]

Tensors have shapes but no values, so nothing is computed. In bfloat16 autocast, of batches of 256
and 512, whose difference leaves out what does not grow with them (weights, their gradients). What
counts is alive at one time: after the forward pass, at most in the backward pass, and after it.
"plain" is forward and backward, "dpbnn" records contributions as a GPU with Triton does; "dpbnn,
norms held" does so without building norm layers in the backward pass. Norms and clipped sums
follow, of which only small parts are held beside.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import dpbnn
from benchmarks.gpu import transformer
from dpbnn.contributions import rules
from dpbnn.contributions.tape import Tape, layouts
from dpbnn.networks import standard

POSITIONS, PATCH, WIDTH = 196, 768, 384
SHAPES = FakeTensorMode()
Held = tuple[int, int, int]
"""Bytes after the forward pass, at most in the backward pass, and after it."""


class AsOnGPU(TorchFunctionMode):
    """Norm layers in float32, as autocast has them on a GPU and not on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch."""
        if function in (F.layer_norm, torch.layer_norm):
            args = (args[0].float(), *args[1:])
        return function(*args, **(kwargs or {}))


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what it has made."""
        result = op(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor):
                self._note(made.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:

            def gone(_: object) -> None:
                self.now -= size
                del self._known[key]

            self._known[key] = weakref.ref(storage, gone)
            self.now += size
            self.most = max(self.most, self.now)


def vit(layers: int) -> nn.Module:
    """Return the network; it is copied layer by layer, which tensors without values do not take."""
    pooled = nn.AvgPool2d((POSITIONS, 1)), nn.Flatten()
    with torch.device("meta"):
        blocks = transformer(layers, WIDTH, 6, activation="gelu", norm_first=True)
        model = nn.Sequential(
            nn.Linear(PATCH, WIDTH), blocks, nn.LayerNorm(WIDTH), *pooled, nn.Linear(WIDTH, 10)
        )
    with SHAPES:
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
    return model


def batch(size: int) -> tuple[tuple[Tensor], Tensor]:
    return (torch.rand(size, POSITIONS, PATCH),), torch.zeros(size, dtype=torch.long)


def plain(model: nn.Module, size: int) -> Held:
    (x,), y = batch(size)
    with Live() as live:
        loss = F.cross_entropy(model(x), y)
        forward = live.most = live.now
        loss.backward()
    return forward, live.most, live.now


def recorded(model: nn.Module, size: int) -> Held:
    attached = dpbnn.attach(model, "categorical")
    found = layouts(*(attached.discover(*batch(n), {}) for n in (2, 3)), str)
    x, y = batch(size)
    sites, forward = Tape.sites, []

    def backward(tape: Tape, *arguments: Any) -> Any:
        forward.append(live.now)
        live.most = live.now
        return sites(tape, *arguments)

    tiled = mock.patch.object(rules, "tiled", lambda g: g.dtype is torch.bfloat16 and g.dim() == 3)
    normed = mock.patch.object(standard, "normalized", Tensor.float)
    with tiled, normed, mock.patch.object(Tape, "sites", backward), Live() as live:
        contributions = attached.record(x, y, [{}], {}, found)
        held = live.now
    assert contributions.batch_size == size
    return forward[0], live.most, held


def late(model: nn.Module, size: int) -> Held:
    tap = Tape.tap

    def kept(tape: Tape, *arguments: Any, early: bool = False, **options: Any) -> Tensor:
        return tap(tape, *arguments, **options)

    with mock.patch.object(Tape, "tap", kept):
        return recorded(model, size)


def per_example(step: Callable[[nn.Module, int], Held], layers: int) -> list[float]:
    """Return bytes per example, as `Held` has them."""
    one, other = vit(layers), vit(layers)
    with SHAPES, AsOnGPU(), torch.autocast("cpu", torch.bfloat16):
        small, large = step(one, 256), step(other, 512)
    return [(more - less) / 256 for less, more in zip(small, large, strict=True)]


STEPS = {"plain": plain, "dpbnn": recorded, "dpbnn, norms held": late}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    layers = parser.parse_args().layers
    print("| MB per example | after forward | at most in backward | after it | x plain |")
    print("|---|---|---|---|---|")
    most = 0.0
    for name, step in STEPS.items():
        found = per_example(step, layers)
        most = most or max(found)
        shown = " | ".join(f"{value / 1e6:.1f}" for value in found)
        print(f"| {name} | {shown} | {max(found) / most:.2f} |")


if __name__ == "__main__":
    main()
