"""The probe: a few examples show whether contributions are per example and complete."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dpbnn.contributions.attach import Attached, attach, describe, refuse_changes
from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.recorded import NetworkContributions, random_state
from dpbnn.contributions.tape import Key, layouts, replaced_forwards
from dpbnn.networks.gaussian import GaussianLayer
from dpbnn.networks.inputs import Arguments, called, each
from dpbnn.networks.layers import rules_in
from dpbnn.networks.sharded import local
from dpbnn.privacy.module_state import ModuleState

Gradients = Mapping[str, Tensor]
EXAMPLES = 8
_MASKING = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules whose masks differ between batch sizes, and are left out of that comparison."""


def synthetic(model: nn.Module, x: Arguments, y: Tensor) -> tuple[Arguments, Tensor]:
    """Return random inputs and targets with the shapes and types of a batch, not its values."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    source = torch.Generator().manual_seed(0)

    def like(t: Tensor, high: int, positive: bool) -> Tensor:
        shape = (EXAMPLES, *t.shape[1:])
        if t.dtype == torch.bool:
            return torch.zeros(shape, dtype=t.dtype, device=t.device)
        if t.is_floating_point():
            draw = torch.rand if positive else torch.randn
            return draw(shape, generator=source).to(t)
        return torch.randint(0, high, shape, generator=source).to(t)

    return each(lambda t: like(t, min(tables, default=2), False), x), like(y, 2, True)


@contextmanager
def undone(attached: Attached) -> Iterator[None]:
    """Leave generators, buffers and training modes as they were."""
    model = attached.model
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    states = [(g, g.get_state()) for g in _generators(attached)]
    devices = [attached.device] if attached.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _generators(attached: Attached) -> list[torch.Generator]:
    found = {id(attached.generator): attached.generator}
    for module in attached.model.modules():
        if isinstance(module, GaussianLayer):
            found[id(module.generator)] = module.generator
    return [generator for generator in found.values() if generator is not None]


def _take(t: Tensor, rows: list[int]) -> Tensor:
    return t[[row % len(t) for row in rows]]


class _Probe:
    def __init__(self, attached: Attached, x: Arguments, y: Tensor) -> None:
        self.attached, self.x, self.y = attached, x, y
        self.draws = attached.draw()
        self.recorded: dict[tuple[int, ...], NetworkContributions] = {}
        exact = attached.dtype == torch.float64
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in attached.model.parameters())
        self.tolerance = 5e-2 if low else 1e-8 if exact else 1e-3

    def in_double(self) -> _Probe:
        """Return the probe of a copy of the model in float64."""

        def double(t: Tensor) -> Tensor:
            return t.double() if t.is_floating_point() else t

        of = self.attached
        twin = attach(
            copy.deepcopy(of.model).double(), of.likelihood, space=of.space, draws=of.draws
        )
        return _Probe(twin, each(double, self.x), double(self.y))

    def reseed(self) -> None:
        """Set the generators that masks are drawn from; `torch.manual_seed` is far slower."""
        torch.default_generator.manual_seed(0)
        if self.attached.device.type == "cuda":
            torch.cuda.manual_seed(0)

    def rows(self, rows: list[int]) -> tuple[Arguments, Tensor]:
        return each(lambda t: _take(t, rows), self.x), _take(self.y, rows)

    def find_layouts(self) -> dict[Key, str]:
        one = self.attached.discover(*self.rows([0, 1, 2]), self.draws[0])
        two = self.attached.discover(*self.rows([0, 1, 2, 3]), self.draws[0])
        return layouts(one, two, lambda path: describe(self.attached.model, path))

    def contribution(
        self, rows: list[int], found: Mapping[Key, str], which: int | None
    ) -> Gradients:
        if tuple(rows) not in self.recorded:
            self.reseed()
            x, y = self.rows(rows)
            self.recorded[tuple(rows)] = self.attached.record(x, y, self.draws, {}, found)
        weights = torch.zeros(len(rows), device=self.attached.device)
        weights[slice(None) if which is None else which] = 1.0
        return self.attached.parts.mine(self.recorded[tuple(rows)].weighted_sums(weights))

    def reference(self, rows: list[int], which: int | None) -> Gradients:
        """Return the same by autograd through the model as it is, at the same draws."""
        attached = self.attached
        model = attached.model
        self.reseed()
        x, y = self.rows(rows)
        total: dict[str, Tensor] = {}
        for draw in self.draws:
            leaves: dict[str, Tensor] = {
                n: p for n, p in model.named_parameters() if p.requires_grad
            }
            forwards: dict[nn.Module, Callable[..., Tensor]] = {}
            for path, drawn in draw.items():
                layer = model.get_submodule(path)
                assert isinstance(layer, GaussianLayer)
                weights = layer.at(drawn)
                if attached.space == "weights":
                    weights = {n: w.detach().requires_grad_() for n, w in weights.items()}
                    named = {f"{path}.{n}".strip("."): w for n, w in weights.items()}
                    leaves |= {n: w for n, w in named.items() if n in attached.shapes}
                forwards[layer] = _fixed(layer, weights)
            leaves = {n: leaf for n, leaf in leaves.items() if n in attached.shapes}
            parts = attached.parts
            with torch.enable_grad(), replaced_forwards(forwards), parts.gathered():
                nll = -attached.log_prob(called(model, x), y) / len(self.draws)
                chosen = nll.sum() if which is None else nll[which]
                values = parts.gradients(chosen, list(leaves.values()))
            for (name, leaf), value in zip(leaves.items(), values, strict=True):
                value = torch.zeros_like(local(leaf)) if value is None else value.detach()
                total[name] = total[name] + value if name in total else value
        return total

    def draws_masks(self) -> bool:
        """Return whether the forward pass draws random numbers, such as dropout masks."""
        before = random_state(self.attached.device)
        self.attached.discover(*self.rows([0, 1, 2, 3]), self.draws[0])
        after = random_state(self.attached.device)
        return not all(torch.equal(one, two) for one, two in zip(before, after, strict=True))

    def refuse_coupling(
        self, found: Mapping[Key, str], one: list[int], two: list[int], which: int, tolerance: float
    ) -> None:
        """Raise if an example's contribution differs between two batches that hold it."""
        name = self.differing(
            self.contribution(one, found, which), self.contribution(two, found, which), tolerance
        )
        if name is not None:
            raise UnsupportedModel(
                f"an example's contribution to {name!r} of {describe(self.attached.model, name)} "
                "depends on the other examples of its batch; the model or the likelihood "
                f"{self.attached.likelihood!r} mixes examples. Use per-example layers such as "
                "torch.nn.GroupNorm and a per-example log-likelihood, without means or weights "
                "over the batch."
            )

    def refuse_missing(self, found: Mapping[Key, str], which: int | None) -> None:
        """Raise if contributions are not the gradient that autograd finds."""
        rows = [0, 1, 2, 3]
        wanted = self.reference(rows, which)
        name = self.differing(self.contribution(rows, found, which), wanted, self.tolerance)
        if name is not None:
            raise UnsupportedModel(
                f"the contributions of parameter {name!r} of {describe(self.attached.model, name)} "
                "are not its gradient on probe examples; it is used outside its module's forward, "
                "or the probe's random examples do not suit the model. Use it only inside its "
                "module, or call attached.probe(x, y) with a few public examples."
            )

    def differing(self, one: Gradients, two: Gradients, tolerance: float) -> str | None:
        """Return the first name whose gradients differ, or None."""
        norm = self.attached.parts.norm
        sizes = {name: norm(_norm(value)) for name, value in two.items()}
        scale = torch.stack(list(sizes.values())).norm()
        for name, size in sizes.items():
            distance = norm(_norm(one[name], two[name]))
            if not distance <= tolerance * size + 1e-2 * tolerance * scale + 1e-30:
                return name
        return None


def _norm(*values: Tensor) -> Tensor:
    """Return the norm of a tensor, or of the difference of two, in float64 and by pieces."""
    pieces = zip(*(torch.split(value.flatten(), 1 << 18) for value in values), strict=True)
    parts = [torch.linalg.vector_norm((p[0] - p[1] if p[1:] else p[0]).double()) for p in pieces]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return norm


def _fixed(layer: GaussianLayer, weights: dict[str, Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, sample: bool = True) -> Tensor:
        return layer.apply_weights(x, weights["weight"], weights.get("bias"))

    return forward


def _refuse_batch_sizes(run: _Probe, found: Mapping[Key, str]) -> None:
    """Raise if an example's contribution depends on the number of the others.

    Kernels round differently for another batch size, and a maximum of nearly equal numbers turns by
    that: a large difference that is no coupling. So a difference is looked at once more, in
    float64 on a copy of the model, where a coupling is as large as before.
    """
    rows = [0, 1, 2, 3], [0, 1, 2], 0
    try:
        run.refuse_coupling(found, *rows, run.tolerance)
    except UnsupportedModel as refusal:
        if run.tolerance != 1e-3:
            raise
        try:
            exact = run.in_double()
            exact.refuse_coupling(found, *rows, exact.tolerance)
        except Exception:  # also of a model that cannot be copied, or wants float32
            raise refusal from None


def probe(attached: Attached, x: Arguments, y: Tensor) -> dict[Key, str]:
    """Return where layers hold the examples, after checks on a few examples.

    - Nothing that the model or the likelihood holds changes when they are called.
    - The contributions' sum is the gradient of the whole objective, for every parameter.
    - Replacing the other examples leaves an example's contribution as it was.
    - So does changing the batch size.

    Model, generators and buffers are left as they were.
    """
    model = attached.model
    state = ModuleState(model=model, likelihood=attached.likelihood, rules=rules_in(model))
    with undone(attached):
        run = _Probe(attached, x, y)
        run.reseed()
        found = run.find_layouts()
        refuse_changes(state.differences(thorough=True))

        run.refuse_coupling(found, [0, 1, 2, 3], [0, 5, 6, 7], 0, 1e-5)
        run.refuse_coupling(found, [0, 1, 2, 3], [4, 5, 6, 3], 3, 1e-5)
        run.recorded.clear()
        for module in model.modules():
            if isinstance(module, _MASKING):
                module.eval()
        if run.draws_masks():
            model.eval()
        # Without autocast, whose rounding would hide a gradient that is wrong.
        with torch.autocast(attached.device.type, enabled=False):
            run.refuse_missing(found, None)
            run.refuse_missing(found, 0)
            _refuse_batch_sizes(run, found)
    refuse_changes(state.differences(thorough=True))
    return found
