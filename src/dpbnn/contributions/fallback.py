"""Any other per-example module: its gradients by torch.func, from recorded inputs and g."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.recorded import random_state
from dpbnn.contributions.rounding import accurate
from dpbnn.contributions.rules import Unit
from dpbnn.contributions.sites import CHANGED, KEPT, Site
from dpbnn.contributions.tape import Discovery, Tape
from dpbnn.networks.layers import Forward


class Replayed(Site):
    """A module whose gradients come from replaying it per example at its recorded inputs."""

    def __init__(
        self,
        module: nn.Module,
        names: dict[str, str],
        inputs: list[Any],
        batched: list[bool],
        g: Tensor,
    ) -> None:
        self.module, self.inputs, self.batched, self.g = module, inputs, batched, g
        self.batch, self.data_free = len(g), {}
        parameters = dict(module.named_parameters())
        self.names = names
        self.shapes = {released: parameters[own].shape for own, released in names.items()}
        self._parameters = {own: parameters[own].detach() for own in names}
        self._versions = self._current_versions()
        self._kept: dict[str, Tensor] | None = None

    def _current_versions(self) -> list[int]:
        held = [x for x in self.inputs if isinstance(x, Tensor)]
        return [t._version for t in (*self._parameters.values(), *held)]

    def instantiate(self, rows: slice) -> dict[str, Tensor]:
        """Return the contributions of some examples without the data-free part."""
        if self._kept is None and self.batch * sum(s.numel() for s in self.shapes.values()) <= KEPT:
            self._kept = self._replay(slice(0, self.batch))
        if self._kept is not None:
            return {name: values[rows] for name, values in self._kept.items()}
        return self._replay(rows)

    def _replay(self, rows: slice) -> dict[str, Tensor]:
        if self._current_versions() != self._versions:
            raise RuntimeError(CHANGED)

        def objective(parameters: dict[str, Tensor], inputs: list[Any], g: Tensor) -> Tensor:
            arguments = [
                x.unsqueeze(0) if b else x for x, b in zip(inputs, self.batched, strict=True)
            ]
            out = functional_call(self.module, parameters, tuple(arguments))
            return (accurate(out) * g.unsqueeze(0)).sum()

        inputs = [x[rows] if b else x for x, b in zip(self.inputs, self.batched, strict=True)]
        dims = [0 if b else None for b in self.batched]
        with torch.enable_grad():
            gradients = vmap(grad(objective), (None, dims, 0))(
                self._parameters, inputs, self.g[rows]
            )
        return {name: accurate(gradients[own].detach()) for own, name in self.names.items()}


def replayed(module: nn.Module, unit: Unit, tape: Tape | Discovery) -> Forward:
    """Record a module's inputs and output gradient, to be replayed per example."""
    original: Callable[..., Any] = module.forward
    names = {own: name for own, (name,) in unit.names.items() if name is not None}
    described = f"{unit.path or 'the model'!r} ({type(module).__name__})"

    def forward(*inputs: Any, **options: Any) -> Any:
        device = next(module.parameters()).device
        before = random_state(device) if isinstance(tape, Discovery) else []
        z = original(*inputs, **options)
        if isinstance(tape, Discovery):
            drawn = zip(before, random_state(device), strict=True)
            if not all(torch.equal(one, two) for one, two in drawn):
                raise UnsupportedModel(
                    f"{described} holds parameters of its own and draws random numbers, which "
                    "cannot be replayed; move the parameters or the dropout to a module of its own."
                )
        if options or not isinstance(z, Tensor) or not inputs or not isinstance(inputs[0], Tensor):
            raise UnsupportedModel(
                f"{described} has no rule of its own and takes or returns more than tensors; "
                "wrap it in a module that maps positional tensors to one tensor."
            )
        kept = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        batched = [
            isinstance(x, Tensor) and tape.layout(f"{unit.path}({i})", x) == "first"
            for i, x in enumerate(inputs)
        ]

        def build(a: Tensor, g: Tensor) -> list[Site]:
            return [Replayed(module, names, kept, batched, g)]

        return tape.tap(unit.path, inputs[0], z, build, alone=True)

    return forward
