"""Max pooling inside a recording is torch's own, to the bit."""

import math

import pytest
import torch
import torch.nn.functional as F
from contributions_contract import assert_matches, per_example
from torch import nn

from dpbnn.contributions import attach
from dpbnn.networks.pooling import _ChannelsLastMax, pooling

WINDOWS = [
    nn.MaxPool2d(2, 1),
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, padding=1),
    nn.MaxPool2d((2, 3), (1, 2), dilation=(2, 1), ceil_mode=True),
]


def inputs(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randint(-3, 4, (5, 9, 11, 12)).to(dtype).relu_()  # ties everywhere
    x[1, 2, 3, 4], x[2, 0], x[3, 1, 2, 2] = math.nan, math.inf, -math.inf
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("module", WINDOWS, ids=repr)
def test_values_and_gradients_are_those_of_torch(module: nn.MaxPool2d, dtype: torch.dtype) -> None:
    x = inputs(dtype).requires_grad_()
    plain, quick = module(x), pooling(module, None)(x)
    assert type(quick.grad_fn).__name__ == f"{_ChannelsLastMax.__name__}Backward"
    assert torch.equal(plain.nan_to_num(7.5), quick.nan_to_num(7.5))
    assert plain.stride() == quick.stride()
    g = torch.randn_like(plain)
    for one, two in zip(*(torch.autograd.grad(z, x, g) for z in (plain, quick)), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.MaxPool2d(2), torch.randn(4, 7, 6, 6)),
        (nn.MaxPool2d(2), torch.randn(9, 6, 6)),
        (nn.MaxPool2d(2), torch.randn(4, 9, 6, 6).to(memory_format=torch.channels_last)),
        (nn.MaxPool2d(2), torch.randn(4, 9, 6, 6).bfloat16()),
    ],
)
def test_other_inputs_are_left_to_torch(module: nn.MaxPool2d, x: torch.Tensor) -> None:
    quick = pooling(module, None)(x.requires_grad_())
    assert torch.equal(quick, module(x))
    assert quick.grad_fn is not None
    assert _ChannelsLastMax.__name__ not in type(quick.grad_fn).__name__


def test_indices_are_left_to_torch() -> None:
    values, indices = pooling(nn.MaxPool2d(2, return_indices=True), None)(torch.randn(4, 9, 6, 6))
    assert values.shape == indices.shape == (4, 9, 3, 3)


def test_contributions_through_pooling_match_float64_gradients() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(8, 9, 3, 2), nn.MaxPool2d(2),
        nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    x, y = torch.randn(6, 1, 14, 14), torch.randint(0, 3, (6,))
    model(x)
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))


def test_a_pooling_class_of_ones_own_keeps_its_forward() -> None:
    class Halved(nn.MaxPool2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 0.5 * F.max_pool2d(input, self.kernel_size)

    model = nn.Sequential(nn.Conv2d(1, 8, 3), Halved(2), nn.Flatten(), nn.Linear(8 * 16, 3))
    x, y = torch.randn(6, 1, 10, 10), torch.randint(0, 3, (6,))
    assert_matches(attach(model, "categorical")(x, y), per_example(model, "categorical", x, y))
