"""Norms and sums on a GPU are those of the CPU, also of examples that are not finite."""

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.contributions.rounding import (
    position_sums,
    row_squares,
    squares,
    summed_rows,
    weighable,
)
from dpbnn.contributions.tiles import tile_error, tile_squares, tile_sums
from dpbnn.privacy import fused

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


@pytest.mark.parametrize("size", [(5, 7, 9, 40), (33, 197, 130, 260)])
def test_gradients_that_are_never_stored_have_their_norms_and_sums(size):
    """What is summed is a multiple of what was measured; not finite ones are left out."""
    pytest.importorskip("triton")
    batch, positions, rows, columns = size
    torch.manual_seed(0)
    g = torch.randn(batch, positions, rows, device="cuda").bfloat16()
    a = torch.randn(batch, positions, columns, device="cuda").bfloat16()
    exact = torch.einsum("btr,btc->brc", g.double(), a.double())
    found = tile_squares(g, a)
    torch.testing.assert_close(found, exact.flatten(1).square().sum(1), rtol=1e-5, atol=0)
    w = torch.rand(batch, device="cuda")
    w[2], g[2] = 0.0, torch.nan
    torch.testing.assert_close(
        tile_sums(g, a, w).double(),
        torch.einsum("b,brc->rc", w.double(), exact),
        rtol=1e-4,
        atol=1e-3,
    )
    assert tile_squares(g, a).isfinite().tolist() == [i != 2 for i in range(batch)]
    one = torch.zeros_like(w)
    one[3] = 1.0
    gap = torch.linalg.matrix_norm(tile_sums(g, a, one).double() - exact[3])
    sizes = g[3].double().norm(dim=1) * a[3].double().norm(dim=1)
    assert gap <= tile_error(positions) / 2 * sizes.sum()


def test_norms_under_autocast_are_never_below_what_is_summed():
    torch.manual_seed(0)
    x, y = torch.randint(0, 11, (12, 9), device="cuda"), torch.randint(0, 3, (12,), device="cuda")
    model = Tokens().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        c = dpbnn.attach(model, "categorical")(x, y)
        norms = c.norms()
        sums = [c.weighted_sum(row) for row in torch.eye(12, device="cuda")]
    for norm, own in zip(norms, sums, strict=True):
        actual = torch.cat([v.flatten() for v in own.values()]).double().norm()
        assert actual <= norm <= actual * 1.01
    exact = dpbnn.attach(model.float(), "categorical")(x, y)
    torch.testing.assert_close(norms, exact.norms(), rtol=0.05, atol=0)


def test_weights_under_autocast_are_those_of_the_present_step():
    """Autocast keeps what it has cast, which an update in place would leave behind."""
    x, y = torch.rand(6, 5, 8, device="cuda"), torch.randint(0, 3, (6,), device="cuda")
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)).cuda()
    attached = dpbnn.attach(model, "categorical")
    with torch.autocast("cuda", torch.bfloat16):
        before = attached(x, y).norms()
        with torch.no_grad():
            model[0].weight.mul_(-3.0)
        after = attached(x, y).norms()
    assert not torch.allclose(before, after, rtol=0.01)


@pytest.mark.parametrize("columns", [700, 70_001])
def test_weighted_sums_of_long_rows_leave_out_what_has_no_weight(columns):
    torch.manual_seed(0)
    rows, w = torch.randn(37, columns, device="cuda"), torch.rand(37, device="cuda")
    w[5] = 0.0
    wanted = w.double() @ rows.double()
    rows[5] = torch.nan
    bad = rows.isnan().any(1)
    found = summed_rows(w[:, None], weighable(rows, bad, exact=False))[0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_fused_steps_of_the_clip_are_what_torch_operations_are(monkeypatch):
    """Also of norms, weights and rows that are not finite."""
    torch.manual_seed(0)
    parts = torch.rand(3, 300, device="cuda", dtype=torch.float64)
    parts[1, 7], parts[2, 9], parts[0, 11] = torch.nan, torch.inf, 0.0
    norms = parts[0].clone()
    norms[3], norms[4], norms[5] = torch.nan, torch.inf, 0.0
    w, g = torch.rand(300, device="cuda"), torch.randn(300, 70, device="cuda")
    a = torch.randn(300, 5, 401, device="cuda")
    w[7], g[7], a[7] = 0.0, torch.nan, torch.inf

    def all_of_them():
        total, bad = fused.total_of(parts, 1.5)
        return [
            total,
            bad,
            fused.clip_factors(norms, 0.3),
            fused.clip_factors(norms, torch.inf),
            fused.with_roots(parts[0].contiguous(), norms, 1e-6),
            fused.row_weights(norms.nan_to_num(), bad, torch.float32),
        ]

    found, both = all_of_them(), fused.scaled_rows(g, a, w)
    assert found[2].max() == 1
    assert (found[2] * norms).nan_to_num().max() <= 0.3 * (1 + 1e-15)
    torch.testing.assert_close(both[0], (g * w[:, None]).nan_to_num(0.0), rtol=0, atol=0)
    torch.testing.assert_close(both[1], a.nan_to_num(0.0, 0.0, 0.0), rtol=0, atol=0)
    monkeypatch.setattr(fused, "triton_kernels", lambda: None)
    for one, two in zip(found, all_of_them(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 8, 128, 300])
@pytest.mark.parametrize("columns", [1, 10, 33, 1200])
def test_weighted_sums_of_short_rows_are_exact(batch, columns):
    torch.manual_seed(0)
    rows, w = torch.randn(batch, columns, device="cuda"), torch.rand(batch, device="cuda")
    found = summed_rows(w[:, None], weighable(rows, None, exact=False))[0]
    torch.testing.assert_close(found.double(), w.double() @ rows.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(3, 2, 5), (40, 17, 130), (200, 33, 384)])
def test_sums_over_positions_come_with_their_squares(size, dtype):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    h = torch.randn(size, device="cuda").to(dtype)
    sums, squared = position_sums(h)
    torch.testing.assert_close(sums, h.float().sum(1), rtol=1e-5, atol=1e-4)
    exact = h.double().square().sum((1, 2))
    assert (squared >= exact * (1 - 1e-12)).all()
    torch.testing.assert_close(squared, exact, rtol=1e-12, atol=0)
    h[1, 0, 2] = torch.nan
    h[2, 1, 3] = 3e38
    assert position_sums(h)[1].isfinite().tolist() == [i not in (1, 2) for i in range(size[0])]
