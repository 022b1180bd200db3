"""Attention and transformer layers: a rule that writes attention out, and their saved forms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.networks.layers import Forward, attributes, multiplied, register


def _attention(layer: Any, record: Any) -> Forward:
    """MultiheadAttention, written out through its linear maps."""
    width = layer.embed_dim

    def project(x: Tensor) -> Tensor:
        x = multiplied(x)
        z = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
        return record.linear(x, z, weight="in_proj_weight", bias="in_proj_bias", at="in_proj")

    def packed(*inputs: Tensor) -> tuple[Tensor, ...]:
        if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
            return project(inputs[0]).chunk(3, -1)
        every = [project(x) for x in inputs]
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
            record.refuse("got inputs without a batch axis; add one.")
        inputs = (query, key, value)
        if not layer.batch_first:
            same = query is key and key is value
            query = query.transpose(0, 1)
            inputs = (query,) * 3 if same else (query, key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (heads(x) for x in packed(*inputs))
        mask = _mask(key_padding_mask, attn_mask, layer.num_heads, q)
        p = layer.dropout if layer.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            shares = (scores if mask is None else scores + mask).softmax(-1)
            out = F.dropout(shares, p, p > 0) @ v
            weights = shares.mean(1) if average_attn_weights else shares
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, p)
        x = out.transpose(1, 2).flatten(2)
        z = F.linear(x, layer.out_proj.weight, layer.out_proj.bias)
        out = record.linear(x, z, weight="out_proj.weight", bias="out_proj.bias", at="out_proj")
        return (out if layer.batch_first else out.transpose(0, 1)), weights

    return forward


def _mask(padding: Tensor | None, mask: Tensor | None, heads: int, q: Tensor) -> Tensor | None:
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


def _attention_arguments(layer: Any) -> dict[str, Any]:
    if layer.bias_k is not None or layer.add_zero_attn:
        raise TypeError("MultiheadAttention with add_bias_kv or add_zero_attn")
    names = ("embed_dim", "num_heads", "dropout", "kdim", "vdim", "batch_first")
    return {"bias": layer.in_proj_bias is not None, **attributes(*names)(layer)}


register(
    nn.MultiheadAttention,
    _attention,
    saved=_attention_arguments,
    whole=True,
    usual=lambda m: m._qkv_same_embed_dim and m.bias_k is None and not m.add_zero_attn,
)


def _encoder_arguments(layer: Any) -> dict[str, Any]:
    named = {F.relu: "relu", F.gelu: "gelu"}
    if layer.activation not in named:
        raise TypeError("TransformerEncoderLayer with an activation other than relu and gelu")
    return {
        "d_model": layer.linear1.in_features,
        "nhead": layer.self_attn.num_heads,
        "dim_feedforward": layer.linear1.out_features,
        "dropout": layer.dropout.p,
        "activation": named[layer.activation],
        "layer_norm_eps": layer.norm1.eps,
        "batch_first": layer.self_attn.batch_first,
        "norm_first": layer.norm_first,
        "bias": layer.linear1.bias is not None,
    }


register(nn.TransformerEncoderLayer, saved=_encoder_arguments)
