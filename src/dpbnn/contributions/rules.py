"""One rule per layer family: a forward that records what norms and sums need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.contributions.dense import UnsupportedModel
from dpbnn.contributions.outer import ConvFactors, Factors, LinearFactors, Outer, Window
from dpbnn.contributions.rounding import accurate, squares
from dpbnn.contributions.sites import Direct, Rows, Site, summed_positions
from dpbnn.contributions.tape import Build, Discovery, Tape
from dpbnn.networks import GaussianConv2d, GaussianLayer, GaussianLinear, LearnedNoise

Recorder = Tape | Discovery
Forward = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is recorded as a whole.

    Attributes:
        path: dotted path in the model.
        rule: makes the recording forward.
        names: released names by the module's own parameter names (frozen ones are absent).
    """

    path: str
    rule: Callable[[nn.Module, Unit, Recorder], Forward]
    names: dict[str, str]

    def released(self, *parameters: str) -> list[str | None]:
        """Return the released names of the module's parameters, None where frozen."""
        return [self.names.get(parameter) for parameter in parameters]


def _affine(
    factors: Callable[[Tensor, Tensor, Tensor, Tensor], Factors],
    shape: torch.Size,
    weight: list[str | None],
    bias: list[str | None],
    positions: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | float]],
    bias_scale: Tensor | None = None,
) -> Build:
    def build(a: Tensor, g: Tensor) -> list[Site]:
        sites: list[Site] = []
        a = accurate(a)
        a_squares = squares(a) if any(weight) else None
        squared = squares(g)  # after those of a: g is read again for the sums
        if any(bias):
            gradient, slack = positions(g, squared)
            known = squared if bias[0] and gradient.numel() == g.numel() else None
            sites.append(Direct(bias, [(gradient, bias_scale, slack)], known))
        if a_squares is not None:
            sites.append(Outer(weight, shape, [factors(a, g, a_squares, squared)]))
        return sites

    return build


def _rows(t: Tensor) -> Tensor:
    """Return [batch, T, width], or [batch, width] where T = 1."""
    if t.dim() == 2:
        return t
    rows = t.flatten(1, -2)
    return rows[:, 0] if rows.shape[1] == 1 else rows


def _over_rows(g: Tensor, squared: Tensor) -> tuple[Tensor, Tensor | float]:
    return (g, 0.0) if g.dim() == 2 else summed_positions(g, 1, squared)


def _linear_build(
    shape: torch.Size,
    weight: list[str | None],
    bias: list[str | None],
    scale: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Build:
    def factors(a: Tensor, g: Tensor, a_squares: Tensor, g_squares: Tensor) -> Factors:
        return LinearFactors(a, g, a_squares, g_squares, scale)

    inner = _affine(factors, shape, weight, bias, _over_rows, bias_scale)
    return lambda a, g: inner(_rows(a), _rows(g))


def linear(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """Linear: G = sum_t g_t a_t^T, bias sum_t g_t."""
    assert isinstance(module, nn.Linear)
    build = _linear_build(module.weight.shape, unit.released("weight"), unit.released("bias"))

    def forward(input: Tensor) -> Tensor:
        return tape.tap(unit.path, input, F.linear(input, module.weight, module.bias), build)

    return forward


def _pixels(t: Tensor) -> Tensor:
    return t.flatten(2) if t.dim() > 2 else t.unsqueeze(2)


def _over_pixels(g: Tensor, squared: Tensor) -> tuple[Tensor, Tensor | float]:
    return summed_positions(_pixels(g), 2, squared)


def _conv_build(
    module: Any,
    shape: torch.Size,
    padding: tuple[int, ...],
    weight: list[str | None],
    bias: list[str | None],
    scale: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Build:
    window = Window(shape, module.stride, padding, module.dilation, module.groups)

    def factors(a: Tensor, g: Tensor, a_squares: Tensor, g_squares: Tensor) -> Factors:
        return ConvFactors(a, g, a_squares, g_squares, window, scale)

    return _affine(factors, shape, weight, bias, _over_pixels, bias_scale)


def _padded(module: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if isinstance(module.padding, str) or module.padding_mode != "zeros":
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        if isinstance(module.padding, str):
            sides = _string_padding(module)
        else:
            sides = [side for pad in reversed(module.padding) for side in (pad, pad)]
        return F.pad(x, sides, mode=mode), (0,) * len(module.stride)
    return x, module.padding


def _string_padding(module: Any) -> list[int]:
    sides = []
    for size, dilation in zip(reversed(module.kernel_size), reversed(module.dilation), strict=True):
        total = dilation * (size - 1) if module.padding == "same" else 0
        sides += [total // 2, total - total // 2]
    return sides


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def convolution(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """Convolution: G = sum_t g_t a_t^T over output positions t with patches a_t."""
    layer: Any = module
    function = _CONVOLUTIONS[len(layer.stride)]

    def forward(input: Tensor) -> Tensor:
        x, padding = _padded(layer, input)
        z = function(
            x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
        )
        build = _conv_build(
            layer,
            layer.weight.shape,
            padding,
            unit.released("weight"),
            unit.released("bias"),
        )
        return tape.tap(unit.path, x, z, build, alone=True)

    return forward


def gaussian(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """Gaussian layer at the tape's draw: G for mu or the drawn weight, and k * G for rho."""
    assert isinstance(module, GaussianLayer)
    draw = tape.draw[unit.path]
    with torch.no_grad():
        if any(name.endswith("_rho") for name in unit.names):
            weights, scales = module.at_with_scale(draw)
        else:
            weights, scales = module.at(draw), {}

    def names(which: str) -> list[str | None]:
        if which in unit.names:
            return unit.released(which)
        return unit.released(f"{which}_mu", f"{which}_rho")

    def forward(x: Tensor, sample: bool = True) -> Tensor:
        common = (names("weight"), names("bias"), scales.get("weight"), scales.get("bias"))
        shape = weights["weight"].shape
        z = module.apply_weights(x, weights["weight"], weights.get("bias"))
        if isinstance(module, GaussianConv2d):
            x, padding = _padded(module, x)
            build = _conv_build(module, shape, padding, *common)
        else:
            build = _linear_build(shape, *common)
        return tape.tap(unit.path, x, z, build, alone=isinstance(module, GaussianConv2d))

    return forward


def embedding(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """Embedding: every position adds g_t to the row of its index."""
    assert isinstance(module, nn.Embedding)
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UnsupportedModel(
            f"{unit.path!r} (Embedding) uses max_norm, scale_grad_by_freq or sparse, whose "
            "gradients are not taken per example; use an Embedding without them."
        )

    def build(a: Tensor, g: Tensor) -> list[Site]:
        g = g.reshape(len(g), -1, g.shape[-1])
        indices = a.reshape(len(g), -1).long()
        if module.padding_idx is not None:
            g = g.masked_fill((indices == module.padding_idx).unsqueeze(-1), 0.0)
        return [Rows(unit.names["weight"], module.weight.shape, indices, g)]

    def forward(input: Tensor) -> Tensor:
        z = F.embedding(input, module.weight, module.padding_idx)
        return tape.tap(unit.path, input, z, build)

    return forward


def _direct(name: str | None, h: Tensor, axis: int) -> list[Site]:
    if name is None:
        return []
    gradient, slack = summed_positions(h, axis, squares(h))
    return [Direct([name], [(gradient, None, slack)])]


def trailing_norm(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """LayerNorm and RMSNorm: weight sum_t g_t * xhat_t, bias sum_t g_t."""
    layer: Any = module
    root_mean_square = isinstance(module, nn.RMSNorm)
    weight, bias = unit.released("weight", "bias")

    def build(a: Tensor, g: Tensor) -> list[Site]:
        shape = (len(g), -1, *layer.normalized_shape)
        g = g.reshape(shape)
        sites = _direct(bias, g, 1)
        if weight is not None:
            normal = F.rms_norm if root_mean_square else F.layer_norm
            eps = torch.finfo(a.dtype).eps if layer.eps is None else layer.eps
            a = accurate(a).reshape(shape)
            sites += _direct(weight, normal(a, layer.normalized_shape, eps=eps).mul_(g), 1)
        return sites

    def forward(input: Tensor) -> Tensor:
        return tape.tap(unit.path, input, type(module).forward(layer, input), build)

    return forward


def channel_norm(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """GroupNorm and InstanceNorm: weight sum_t g_t * xhat_t, bias sum_t g_t, per channel."""
    layer: Any = module
    weight, bias = unit.released("weight", "bias")

    def build(a: Tensor, g: Tensor) -> list[Site]:
        sites = _direct(bias, _pixels(g), 2)
        if weight is not None:
            a = accurate(a)
            groups = layer.num_groups if isinstance(module, nn.GroupNorm) else a.shape[1]
            normal = F.group_norm(a, groups, eps=layer.eps)
            sites += _direct(weight, _pixels(normal.mul_(g)), 2)
        return sites

    def forward(input: Tensor) -> Tensor:
        z = type(module).forward(layer, input)
        return tape.tap(unit.path, input, z, build, alone=True)

    return forward


def learned_noise(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """LearnedNoise: sum_t g_t over the outputs that hold the log-variance."""
    assert isinstance(module, LearnedNoise)
    name, width = unit.names["log_variance"], len(module.log_variance)

    def build(a: Tensor, g: Tensor) -> list[Site]:
        return _direct(name, g.reshape(len(g), -1, g.shape[-1])[..., -width:], 1)

    def forward(x: Tensor) -> Tensor:
        return tape.tap(unit.path, x, LearnedNoise.forward(module, x), build)

    return forward


def attention(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """MultiheadAttention, written out through its linear maps."""
    assert isinstance(module, nn.MultiheadAttention)
    layer, width = module, module.embed_dim

    def project(
        path: str, x: Tensor, w: Tensor, b: Tensor | None, names: list[str | None]
    ) -> Tensor:
        build = _linear_build(w.shape, names[:1], names[1:])
        return tape.tap(f"{unit.path}.{path}", x, F.linear(x, w, b), build)

    def packed(*inputs: Tensor) -> tuple[Tensor, ...]:
        names = unit.released("in_proj_weight", "in_proj_bias")
        w, b = layer.in_proj_weight, layer.in_proj_bias
        if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            return project("in_proj", inputs[0], w, b, names).chunk(3, -1)
        every = [project("in_proj", x, w, b, names) for x in inputs]
        return tuple(z[..., i * width : (i + 1) * width] for i, z in enumerate(every))

    def heads(x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (layer.num_heads, -1)).transpose(1, 2)

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.dim() != 3:
            raise UnsupportedModel(
                f"{unit.path!r} (MultiheadAttention) got inputs without a batch axis; add one."
            )
        inputs = (query, key, value)
        if not layer.batch_first:
            same = query is key and key is value
            query = query.transpose(0, 1)
            inputs = (query,) * 3 if same else (query, key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (heads(x) for x in packed(*inputs))
        mask = _attention_mask(key_padding_mask, attn_mask, layer.num_heads, q)
        p = layer.dropout if layer.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            shares = (scores if mask is None else scores + mask).softmax(-1)
            out = F.dropout(shares, p, p > 0) @ v
            weights = shares.mean(1) if average_attn_weights else shares
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, p)
        projection = layer.out_proj
        out = project(
            "out_proj",
            out.transpose(1, 2).flatten(2),
            projection.weight,
            projection.bias,
            unit.released("out_proj.weight", "out_proj.bias"),
        )
        return (out if layer.batch_first else out.transpose(0, 1)), weights

    return forward


def _attention_mask(
    padding: Tensor | None, mask: Tensor | None, heads: int, q: Tensor
) -> Tensor | None:
    def additive(t: Tensor) -> Tensor:
        if t.dtype != torch.bool:
            return t.to(q.dtype)
        return torch.zeros_like(t, dtype=q.dtype).masked_fill(t, float("-inf"))

    parts = []
    if padding is not None:
        parts.append(additive(padding)[:, None, None, :])
    if mask is not None:
        parts.append(
            torch.unflatten(additive(mask), 0, (-1, heads)) if mask.dim() == 3 else additive(mask)
        )
    return sum(parts[1:], parts[0]) if parts else None


class _ChannelsLastMax(torch.autograd.Function):
    """F.max_pool2d, its forward with channels last: there torch has vector instructions for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *window: Any) -> Tensor:
        last = x.contiguous(memory_format=torch.channels_last)
        largest, where = torch.ops.aten.max_pool2d_with_indices(last, *window)
        del last
        result: Tensor = largest.contiguous()
        del largest
        ctx.window = window
        ctx.save_for_backward(x, where.contiguous())
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, where = ctx.saved_tensors
        back = torch.ops.aten.max_pool2d_with_indices_backward
        return back(g.contiguous(), x, *ctx.window, where), *(None for _ in ctx.window)


_FEW_CHANNELS = 8


def pooling(module: nn.Module, unit: Unit, tape: Recorder) -> Forward:
    """MaxPool2d: it has no parameters, but can be had quicker on the CPU, the same to the bit."""
    layer: Any = module

    def forward(input: Tensor) -> Any:
        cpu = input.device.type == "cpu" and input.dtype in (torch.float32, torch.float64)
        usual = input.dim() == 4 and input.is_contiguous() and not layer.return_indices
        if not (cpu and usual and input.shape[1] >= _FEW_CHANNELS):
            return nn.MaxPool2d.forward(layer, input)
        sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        pairs = [list(size) if isinstance(size, tuple) else [size] * 2 for size in sizes]
        return _ChannelsLastMax.apply(input, *pairs, layer.ceil_mode)  # type: ignore[no-untyped-call]

    return forward


RULES: dict[type[nn.Module], Callable[[nn.Module, Unit, Recorder], Forward]] = {
    nn.Linear: linear,
    nn.modules.linear.NonDynamicallyQuantizableLinear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: trailing_norm,
    nn.RMSNorm: trailing_norm,
    nn.GroupNorm: channel_norm,
    nn.InstanceNorm1d: channel_norm,
    nn.InstanceNorm2d: channel_norm,
    nn.InstanceNorm3d: channel_norm,
    GaussianLinear: gaussian,
    GaussianConv2d: gaussian,
    LearnedNoise: learned_noise,
    nn.MultiheadAttention: attention,
    nn.MaxPool2d: pooling,
}


def rule_for(module: nn.Module) -> Callable[[nn.Module, Unit, Recorder], Forward] | None:
    """Return the rule of a module, or None: only exact classes with their usual parameters."""
    rule = RULES.get(type(module))
    if isinstance(module, nn.MultiheadAttention):
        usual = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
        return rule if usual else None
    if rule is None or "forward" in module.__dict__ or module._forward_pre_hooks:
        return None
    return rule
