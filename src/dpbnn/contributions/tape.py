"""The tape: one forward and one backward that keep each layer's input and output gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.rounding import accurate
from dpbnn.contributions.sites import Site

Key = tuple[str, int]
"""A module's path and which of its calls."""
Build = Callable[[Tensor, Tensor], list[Site]]
"""Makes sites of an input and an output gradient, both [batch, ...], or [batch, m, ...] where the
model has m rows per example."""
Draw = dict[str, dict[str, Tensor]]
"""Standard normal draws of the Gaussian layers, by module path and weight."""


class _Anchor(torch.autograd.Function):
    """Makes a tensor part of the graph, in place and without a copy."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(z)
        return z

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Discovery:
    """A dry run that only notes the shapes of layer outputs."""

    def __init__(self, batch: int, draw: Draw) -> None:
        self.batch, self.draw = batch, draw
        self.shapes: dict[Key, torch.Size] = {}
        self._calls: defaultdict[str, int] = defaultdict(int)

    def layout(self, path: str, t: Tensor) -> str:
        """Note the shape of one tensor."""
        self.shapes[path, self._calls[path]] = t.shape
        self._calls[path] += 1
        return "first"

    def tap(self, path: str, a: Tensor, z: Tensor, build: Build, **options: bool) -> Tensor:
        """Note the shape of one output."""
        self.layout(path, z)
        return z


def layouts(one: Discovery, two: Discovery, describe: Callable[[str], str]) -> dict[Key, str]:
    """Return where each layer output holds the examples, from runs with two batch sizes.

    "first" and "second" name the axis, "folded" is a first axis of batch * m, and "shared" an
    output that is the same for all examples.
    """
    if one.shapes.keys() != two.shapes.keys():
        raise UnsupportedModel("the model calls other layers for other batch sizes.")
    found = {}
    for key, shape in one.shapes.items():
        other = two.shapes[key]
        if shape[:1] == (one.batch,) and other[:1] == (two.batch,):
            found[key] = "first"
        elif shape[1:2] == (one.batch,) and other[1:2] == (two.batch,):
            found[key] = "second"
        elif shape == other:
            found[key] = "shared"
        elif shape[0] * two.batch == other[0] * one.batch:
            found[key] = "folded"
        else:
            raise UnsupportedModel(
                f"{describe(key[0])} has outputs {tuple(shape)} and {tuple(other)} for batches of "
                f"{one.batch} and {two.batch}; keep examples on the first axis."
            )
    return found


class _Tap(NamedTuple):
    """One call: the input, its version, and what `tap` was given."""

    a: Tensor
    version: int
    layout: str
    path: str
    build: Build
    alone: bool
    low: bool


class Tape:
    """Records layer inputs and where to find output gradients.

    Args:
        batch: number of examples.
        draw: standard normal draws of the Gaussian layers.
        layouts: where each layer output holds the examples.
        describe: names the module at a path.
    """

    def __init__(
        self, batch: int, draw: Draw, layouts: Mapping[Key, str], describe: Callable[[str], str]
    ) -> None:
        self.batch, self.draw, self._layouts, self._describe = batch, draw, layouts, describe
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._taps: list[tuple[GradientEdge, _Tap]] = []
        self._anchor: Tensor | None = None
        self._built: list[Site] = []

    def layout(self, path: str, t: Tensor) -> str:
        """Return where the tensor at this path holds the examples, in its next call."""
        key = (path, self._calls[path])
        self._calls[path] += 1
        layout = self._layouts.get(key)
        if layout is None:
            raise UnsupportedModel(
                f"{self._describe(path)} was called more often than when it was probed; "
                "probe with inputs of this kind first."
            )
        return layout

    def tap(
        self,
        path: str,
        a: Tensor,
        z: Tensor,
        build: Build,
        *,
        alone: bool = False,
        low: bool = False,
        early: bool = False,
    ) -> Tensor:
        """Record one call; `build` gets input and output gradient after the backward pass.

        Args:
            path: of the module.
            a: its input.
            z: its output.
            build: makes the sites.
            alone: whether an example must have its only row on the first axis.
            low: whether `build` takes gradients of less than float32 as they are.
            early: whether to build in the backward pass, and keep input and gradient no longer.
        """
        layout = self.layout(path, z)
        if z._is_view():  # an operation in place on it would leave the recorded edge unused
            z = z.clone()
        if layout == "shared":
            z = _stacked(z, self.batch, a.dim() > 1 and z.shape[0] == 1)
        tap = _Tap(a.detach(), a._version, layout, path, build, alone, low)
        if early or not z.requires_grad:
            z = z.clone() if layout == "shared" else z
            if self._anchor is None:
                self._anchor = torch.zeros((), requires_grad=True, device=z.device)
            with _unsafe_preserve_version_counter(z):  # its values stay
                z = _Anchor.apply(z, self._anchor)  # type: ignore[no-untyped-call]
        if early:
            held = [tap]

            def arrived(g: Tensor) -> None:
                self._built += self._sites_of(held.pop(), g)

            z.register_hook(arrived)  # type: ignore[no-untyped-call]
        else:
            self._taps.append((get_gradient_edge(z), tap))
        return z

    def sites(self, log_prob: Tensor, factor: float) -> list[Site]:
        """Run the backward pass of factor * log_prob to layer outputs, and return what it leaves.

        Args:
            log_prob: one per example.
            factor: of every example.
        """
        edges = [edge for edge, _ in self._taps]
        gradients: list[Tensor | None] = [None] * len(edges)
        if log_prob.requires_grad:
            # A scalar, since to start from a vector makes torch import sympy, for 0.3 s.
            total = torch.dot(log_prob, torch.full_like(log_prob, factor))
            if self._anchor is not None:  # so that the backward pass comes to all early ones
                edges.append(get_gradient_edge(self._anchor))
            gradients = list(torch.autograd.grad(total, edges, allow_unused=True))
            gradients = gradients[: len(self._taps)]
        result, self._built = self._built, []
        while self._taps:
            (_, tap), g = self._taps.pop(), gradients.pop()
            if g is not None:
                result += self._sites_of(tap, g)
        return result

    def _sites_of(self, tap: _Tap, g: Tensor) -> list[Site]:
        a, version, layout, path, build, alone, low = tap
        if a._version != version:
            raise UnsupportedModel(
                f"the input of {self._describe(path)} was changed in place after the call; "
                "use the out-of-place operation."
            )
        g = g.contiguous() if 0 in g.stride() else g
        g = self._batched(g, layout, path, gradient=True)
        g = g if low else accurate(g)
        if alone and layout in ("second", "folded"):
            raise UnsupportedModel(
                f"{self._describe(path)} sees several rows per example on its batch axis; "
                "keep one row per example, or wrap the reshaping and the layer in one "
                "module."
            )
        return build(self._batched(a, layout, path), g)

    def _batched(self, t: Tensor, layout: str, path: str, gradient: bool = False) -> Tensor:
        batch = self.batch
        if layout == "first" and t.shape[0] == batch:
            return t
        if layout == "shared" and not gradient:
            t = _stacked(t, batch, t.shape[0] == 1 and t.dim() > 1)
        if layout == "second":
            t = t.transpose(0, 1)
        elif layout == "folded":
            if len(t) % batch:
                raise UnsupportedModel(
                    f"{self._describe(path)} sees {len(t)} rows for {batch} examples."
                )
            return torch.unflatten(t, 0, (batch, len(t) // batch))
        if t.shape[0] != batch:
            raise UnsupportedModel(
                f"{self._describe(path)} sees {tuple(t.shape)} for {batch} examples; "
                "keep examples on the same axis for every batch."
            )
        return t


def _stacked(t: Tensor, batch: int, leading: bool) -> Tensor:
    t = t if leading else t.unsqueeze(0)
    return t.expand(batch, *t.shape[1:])


@contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards for a while; the attention fast path is off meanwhile."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, earlier in before.items():
            if earlier is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = earlier
