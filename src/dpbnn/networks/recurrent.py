"""Recurrent layers (RNN, LSTM, GRU and their cells): rules that write the recurrence out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.networks.layers import Forward, Rule, attributes, register

State = tuple[Tensor, ...]  # hidden state first, of an LSTM the cell state second
Step = Callable[[Any, Tensor, Tensor, State], State]
"""(layer, input part, hidden part, state) -> state; the parts hold all gates before they act."""


def _rnn(layer: Any, x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h) if layer.nonlinearity == "tanh" else torch.relu(x + h),)


def _lstm(layer: Any, x: Tensor, h: Tensor, state: State) -> State:
    enter, forget, new, leave = (x + h).chunk(4, -1)
    cell = forget.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(layer: Any, x: Tensor, h: Tensor, state: State) -> State:
    (reset, update, new), (h_reset, h_update, h_new) = x.chunk(3, -1), h.chunk(3, -1)
    keep = (update + h_update).sigmoid()
    fresh = (new + (reset + h_reset).sigmoid() * h_new).tanh()
    return (fresh + keep * (state[0] - fresh),)


def _sequences(step: Step, states: int) -> Rule:
    """Return the rule of a layer that reads whole sequences.

    The hidden states are computed first, without gradients. Then the map from all of them to the
    gates is one linear map over positions, and h - h.detach(), which is zero, carries the gradient
    from step to step.
    """

    def rule(layer: Any, record: Any) -> Forward:
        def run(x: Tensor, state: State, end: str) -> tuple[Tensor, State]:
            """Read x [batch, T, features] by the weights whose names end in `end`."""
            weight, bias = (getattr(layer, f"{kind}_hh{end}", None) for kind in ("weight", "bias"))
            gates = _tapped(layer, record, "ih", end, x)
            with torch.no_grad():
                before, first = [], state
                for part in gates.unbind(1):
                    before.append(first[0].detach())
                    first = step(layer, part, F.linear(first[0], weight, bias), first)
            hidden = _tapped(layer, record, "hh", end, torch.stack(before, 1)).unbind(1)
            outputs = []
            for part, own in zip(gates.unbind(1), hidden, strict=True):
                moved = F.linear(state[0] - state[0].detach(), weight)
                state = step(layer, part, own + moved, state)
                outputs.append(state[0])
            return torch.stack(outputs, 1), state

        def forward(x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
            _check(layer, record, x)
            x = x if layer.batch_first else x.transpose(0, 1)
            given = _given(layer, x, hx, states)
            last: list[State] = []
            for depth in range(layer.num_layers):
                parts = []
                for end in (f"_l{depth}", f"_l{depth}_reverse")[: 1 + layer.bidirectional]:
                    back = end.endswith("_reverse")
                    state = tuple(values[len(last)] for values in given)
                    read, state = run(x.flip(1) if back else x, state, end)
                    parts.append(read.flip(1) if back else read)
                    last.append(state)
                x = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
                if layer.dropout and depth < layer.num_layers - 1:
                    x = F.dropout(x, layer.dropout, layer.training)
            ends = tuple(torch.stack(values) for values in zip(*last, strict=True))
            return x if layer.batch_first else x.transpose(0, 1), ends if states > 1 else ends[0]

        return forward

    return rule


def _cell(step: Step, states: int) -> Rule:
    """Return the rule of a layer that reads one element of a sequence at a time."""

    def rule(layer: Any, record: Any) -> Forward:
        def forward(x: Tensor, hx: Any = None) -> Any:
            if x.dim() != 2:
                record.refuse("got inputs without a batch axis; add one.")
            zeros = x.new_zeros(len(x), layer.hidden_size)
            state = (zeros,) * states if hx is None else hx if states > 1 else (hx,)
            parts = (_tapped(layer, record, n, "", v) for n, v in (("ih", x), ("hh", state[0])))
            state = step(layer, *parts, state)
            return state if states > 1 else state[0]

        return forward

    return rule


def _tapped(layer: Any, record: Any, part: str, end: str, x: Tensor) -> Tensor:
    """Return x through one of the layer's linear maps, recorded."""
    weight, bias = f"weight_{part}{end}", f"bias_{part}{end}"
    z = F.linear(x, getattr(layer, weight), getattr(layer, bias, None))
    return record.linear(x, z, weight=weight, bias=bias, at=f"{part}{end}")


def _check(layer: Any, record: Any, x: Any) -> None:
    if not isinstance(x, Tensor):
        record.refuse("got a packed sequence; pad the sequences, and leave padded steps out later.")
    if x.dim() != 3:
        record.refuse("got inputs without a batch axis; add one.")
    if layer.proj_size:
        record.refuse("has proj_size; leave it out and add a Linear layer.")


def _given(layer: Any, x: Tensor, hx: Any, states: int) -> tuple[Tensor, ...]:
    """Return the first states, [layers and directions, batch, hidden] each."""
    if hx is None:
        count = layer.num_layers * (1 + layer.bidirectional)
        return (x.new_zeros(count, len(x), layer.hidden_size),) * states
    return tuple(hx) if states > 1 else (hx,)


_SIZES = ("input_size", "hidden_size", "bias")
_DEPTH = (*_SIZES, "num_layers", "batch_first", "dropout", "bidirectional")

register(nn.RNN, _sequences(_rnn, 1), saved=attributes(*_DEPTH, "nonlinearity"))
register(nn.LSTM, _sequences(_lstm, 2), saved=attributes(*_DEPTH))
register(nn.GRU, _sequences(_gru, 1), saved=attributes(*_DEPTH))
register(nn.RNNCell, _cell(_rnn, 1), saved=attributes(*_SIZES, "nonlinearity"))
register(nn.LSTMCell, _cell(_lstm, 2), saved=attributes(*_SIZES))
register(nn.GRUCell, _cell(_gru, 1), saved=attributes(*_SIZES))
