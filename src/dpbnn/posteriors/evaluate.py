"""A network evaluated at many weight draws: one vectorised pass, in chunks that fit in memory."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from dpbnn.messages import unquoted
from dpbnn.networks.inputs import Arguments as Inputs
from dpbnn.networks.inputs import Keywords, called, each
from dpbnn.networks.standard import Steps

# Activations of one draw beyond which one draw alone keeps the machine busy, so that a loop over
# draws is as fast as one vectorised pass and smaller.
_BUSY = {"cuda": 2**25, "cpu": 2**19}
_FAILED = (
    "the network raised an error on these inputs",
    "give inputs of the shape, the type and the values that it takes",
)
_FIXED = (nn.Flatten, nn.Hardtanh, Steps)  # layers without weights that draw nothing
_TF32 = {"high": "tf32", "highest": "ieee"}


@dataclass(frozen=True)
class Draws:
    """A sequence of weight draws.

    Attributes:
        count: how many draws there are.
        numbers: values in one draw.
        take: returns the next k draws, stacked: {name: [k, ...]}. What it returns does not depend
            on how the draws are divided into calls.
        masks: whether draws are masks on shared weights; what lies before the first mask is then
            computed once for all draws of a vectorised pass.
    """

    count: int
    numbers: int
    take: Callable[[int], dict[str, Tensor]]
    masks: bool = False


def evaluate(
    model: nn.Module,
    draws: Draws,
    inputs: Inputs,
    *,
    batch_size: int | None = None,
    memory_limit: int | None = None,
    precision: str = "high",
) -> Tensor:
    """Return the model's outputs at every draw, [draws, inputs, ...].

    Args:
        model: called in evaluation mode, its tensors replaced by the drawn ones.
        draws: the weight draws.
        inputs: the arguments of the model, examples first.
        batch_size: examples per pass; as many as fit by default.
        memory_limit: bytes for weights and activations of a pass; half of the free GPU memory by
            default, 1 GiB on the CPU. At least one draw is evaluated at a time.
        precision: of float32 matrix products on a GPU, "high" (TF32) or "highest".
    """
    size, device = len(inputs[0]), inputs[0].device
    for name, value in (("batch_size", batch_size), ("memory_limit", memory_limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1; leave it out for the default.")
    if memory_limit is None:
        memory_limit = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**30
    if precision not in _TF32:
        raise ValueError(f"precision={precision!r} must be one of {', '.join(map(repr, _TF32))}.")
    zeros = each(lambda t: torch.zeros_like(t[:2]), inputs)
    with (
        torch.no_grad(),
        evaluation(model),
        _matrix_products(device, precision),
        unquoted(*_FAILED, public=lambda: called(model, zeros)),
    ):
        active = _activations(model, inputs)
        width = inputs[0].dtype.itemsize if inputs[0].is_floating_point() else 4
        if batch_size is None:
            batch_size = max(1, memory_limit // (2 * active * width))
        batch_size = min(batch_size, size)
        per_draw = width * (2 * draws.numbers + active * batch_size)
        chunk = max(1, min(draws.count, memory_limit // per_draw))
        busy = active * batch_size > _BUSY.get(device.type, _BUSY["cuda"])
        outputs: Tensor | None = None
        for start in range(0, draws.count, chunk):
            drawn = draws.take(min(chunk, draws.count - start))
            for begin in range(0, size, batch_size):
                rows = slice(begin, begin + batch_size)
                part = each(lambda t, rows=rows: t[rows], inputs)  # type: ignore[misc]
                rest, part = _after_fixed(model, part)
                found = _forward(rest, drawn, part, draws.masks or not busy)
                if outputs is None:
                    outputs = found.new_empty((draws.count, size, *found.shape[2:]))
                outputs[start : start + chunk, begin : begin + batch_size] = found
    assert outputs is not None
    return outputs


def _after_fixed(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """Return the network after its first layers, where these are the same for all draws.

    Their outputs take the place of the inputs; names of weights stay.
    """
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
    if type(model) is not nn.Sequential or hooks or len(inputs) > 1 or isinstance(inputs, Keywords):
        return model, inputs
    layers = [(name, layer) for name, layer in model._modules.items() if layer is not None]
    while layers and type(layers[0][1]) in _FIXED:
        inputs = (layers.pop(0)[1](*inputs),)
    if layers:
        inner, inputs = _after_fixed(layers[0][1], inputs)
        layers[0] = (layers[0][0], inner)
    return nn.Sequential(OrderedDict(layers)), inputs


def _forward(
    model: nn.Module, drawn: Mapping[str, Tensor], inputs: Inputs, together: bool
) -> Tensor:
    """Return the outputs at stacked draws, [draws, inputs, ...]."""
    tied_to = places(model)

    def single(weights: dict[str, Tensor]) -> Tensor:
        # Tied here: torch's own way leaves a module that is used twice at the drawn weights.
        tied = {place: weights[name] for name in weights for place in tied_to.get(name, [name])}
        if isinstance(inputs, Keywords):
            named = dict(zip(inputs.names, inputs, strict=True))
            return functional_call(model, tied, (), named, tie_weights=False)
        return functional_call(model, tied, inputs, tie_weights=False)

    if together and len(next(iter(drawn.values()))) > 1:
        # A model that vmap cannot take (it reads values, say) is run draw by draw below, where an
        # error of its own is raised again.
        with contextlib.suppress(RuntimeError):
            return vmap(single)(dict(drawn))
    rows = zip(*(t.unbind(0) for t in drawn.values()), strict=True)
    return torch.stack([single(dict(zip(drawn, row, strict=True))) for row in rows])


def places(model: nn.Module) -> dict[str, list[str]]:
    """Return the places of every tensor by its first one; each module has one path."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), []).append(f"{path}.{name}".strip("."))
    return {paths[0]: paths for paths in found.values()}


_COUNTED: WeakKeyDictionary[nn.Module, dict[tuple[torch.Size, ...], int]] = WeakKeyDictionary()


def _activations(model: nn.Module, inputs: Inputs) -> int:
    """Return how many values the modules of the model compute for one example."""
    known, shapes = _COUNTED.setdefault(model, {}), tuple(t.shape[1:] for t in inputs)
    if shapes not in known:
        known[shapes] = _count_activations(model, inputs)
    return known[shapes]


def _count_activations(model: nn.Module, inputs: Inputs) -> int:
    total = 0

    def count(module: nn.Module, args: object, output: object) -> None:
        nonlocal total
        if isinstance(output, Tensor):
            total += output.numel()

    hooks = [m.register_forward_hook(count) for m in model.modules() if not list(m.children())]
    try:
        called(model, each(lambda t: t[:1], inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return max(total, sum(t[:1].numel() for t in inputs))


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode and attention off its fused path, which has no vmap."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with unfused_attention():
            yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextlib.contextmanager
def unfused_attention() -> Iterator[None]:
    """Keep transformers off torch's fused path, which goes around the modules within them."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextlib.contextmanager
def _matrix_products(device: torch.device, precision: str) -> Iterator[None]:
    """Set how a GPU multiplies float32 matrices."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = _TF32[precision]
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def number_stream(
    width: int, fill: str, like: Tensor, generator: torch.Generator
) -> Callable[[int], Tensor]:
    """Return a function that gives the next k rows of random numbers, [k, width].

    The generator is always called for blocks of the same size, so that the rows do not depend on
    how they are divided into calls.

    Args:
        width: numbers in a row.
        fill: the tensors' method that fills them, "normal_" or "uniform_".
        like: has the dtype and device of the rows.
        generator: the source of numbers.
    """
    block = max(1, min(64, 2**20 // width))
    left = torch.empty(0, width, dtype=like.dtype, device=generator.device)

    def take(count: int) -> Tensor:
        nonlocal left
        ready = len(left)
        rows = left.new_empty(ready + math.ceil(max(0, count - ready) / block) * block, width)
        rows[:ready] = left
        for part in rows[ready:].split(block):
            getattr(part, fill)(generator=generator)
        left = rows[count:].clone()
        return rows[:count].to(like.device)

    return take
