"""Norms and sums on a GPU are those of the CPU, also of examples that are not finite."""

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.contributions.rounding import row_squares, squares

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.last(self.blocks(self.embed(tokens)).mean(1))


def images():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )


CASES = {
    "mlp": (lambda: dpbnn.mlp(169, (20,), 3), {}),
    "convolution": (images, {}),
    "gaussian": (lambda: dpbnn.to_gaussian(dpbnn.mlp(169, (20,), 3)), {"space": "parameters"}),
    "tokens": (Tokens, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_are_those_of_the_cpu(name):
    make, options = CASES[name]
    torch.manual_seed(0)
    torch.backends.cudnn.conv.fp32_precision, before = "ieee", "tf32"
    x, y = torch.randn(40, 1, 13, 13), torch.randint(0, 3, (40,))
    if name == "tokens":
        x = torch.randint(0, 11, (40, 7))
    else:
        x[3], x[5, 0, 2, 2] = torch.nan, torch.inf
    model, w = make(), torch.rand(40)
    found = {}
    try:
        for device in ("cpu", "cuda"):
            attached = dpbnn.attach(model.to(device), "categorical", **options)
            if not found:
                draws = attached.draw()
            there = [{p: {k: e.to(device) for k, e in own.items()} for p, own in draw.items()}
                     for draw in draws]  # fmt: skip
            c = attached(x.to(device), y.to(device), draws=there)
            sums = c.weighted_sum(w.to(device))
            found[device] = c.norms().cpu(), {n: v.cpu().float() for n, v in sums.items()}
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    norms, sums = found["cuda"]
    torch.testing.assert_close(norms, found["cpu"][0], rtol=1e-4, atol=1e-6)
    assert name == "tokens" or (norms[3] == 0 and norms[5] == 0)
    for key, value in found["cpu"][1].items():
        torch.testing.assert_close(sums[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("width", [1, 10, 2048, 5000, 40_000])
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e16])
def test_squares_are_never_below_the_truth(width, scale):
    t = torch.randn(33, width, generator=torch.Generator().manual_seed(0)) * scale
    exact = t.double().square().sum(1)
    for function in (row_squares, squares):
        found = function(t.cuda()).cpu()
        assert (found >= exact * (1 - 1e-6)).all()
        tiny = 2 * width * torch.finfo(torch.float32).tiny
        assert (found <= exact * (1 + 1e-6) + tiny).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_squares_beyond_float32_are_not_finite(value):
    t = torch.ones(4, 700, device="cuda")
    t[2, 5] = value
    assert row_squares(t).isfinite().tolist() == [True, True, False, True]
