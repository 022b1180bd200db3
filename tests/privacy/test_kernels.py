"""The Triton kernels against torch operations: on a GPU compiled, elsewhere interpreted.

Triton's interpreter runs a kernel's own code on the CPU, block by block. It does not show what a
compiler does with it; on a GPU the same tests do. Without Triton all of this is skipped.
"""

import itertools
import os

import numpy as np
import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed: NO KERNEL OF A GPU IS TESTED HERE")

from triton.runtime import interpreter

import dpbnn
from dpbnn.contributions import rounding, tiles
from dpbnn.privacy import chacha, fused, kernels
from dpbnn.privacy.grid import spacing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = bytes(range(32))
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")
TINY = torch.finfo(F32).tiny

if DEVICE.type == "cpu" and type(kernels.add_kernel).__name__ != "InterpretedFunction":
    pytest.skip(
        "Triton was imported before TRITON_INTERPRET=1 was set: NO KERNEL OF A GPU IS TESTED HERE",
        allow_module_level=True,
    )


@pytest.fixture
def by_kernel(monkeypatch):
    """Let kernels take tensors of the CPU, which nothing but the interpreter can."""
    if DEVICE.type == "cuda":
        return

    def fits(*tensors):
        return all(t.is_contiguous() and t.numel() for t in tensors)

    def splat(builder, kind, scalar):
        """Keep the numpy type: the interpreter's own makes a float of a comparison."""
        whole = np.full(kind.shape, scalar.data, dtype=scalar.data.dtype)
        return interpreter.TensorHandle(whole, scalar.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", splat)
    monkeypatch.setattr(fused, "_fused", lambda *t: kernels if fits(*t) else None)
    monkeypatch.setattr(rounding, "_by_kernel", lambda t: t.dtype in (F32, BF16) and t.numel() > 0)


def random(*shape, dtype=F32, seed=0):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return values.to(dtype).to(DEVICE)


# Noise


@pytest.mark.parametrize(("dtype", "grid"), [(F32, F32), (F64, F32), (F64, F64)])
@pytest.mark.parametrize("size", [1, chacha.TILE, 2 * chacha.TILE + 77])
def test_noise_is_that_of_the_torch_operations(dtype, grid, size):
    """Up to one step of the grid, where the last bit of a logarithm or a cosine decides."""
    found, wanted = random(size, dtype=dtype) * 30, random(size, dtype=dtype) * 30
    chacha.add_noise(found, 2.6, grid, KEY, kernel=True)
    chacha.add_noise(wanted, 2.6, grid, KEY, kernel=False)
    g = spacing(2.6, grid)
    steps = (found.double() - wanted.double()).abs() / g
    assert steps.max() <= 1
    assert (steps > 0).double().mean() < 0.01
    assert (found.double() / g % 1 == 0).all()


def test_the_noise_of_a_piece_is_that_of_the_whole():
    whole = random(3 * chacha.TILE + 77, dtype=F64) * 30
    pieces = whole.clone()
    chacha.add_noise(whole, 2.6, F32, KEY, kernel=True)
    cuts = [0, 5, chacha.TILE + 1, 2 * chacha.TILE, 2 * chacha.TILE + 300, len(whole)]
    for first, end in itertools.pairwise(cuts):
        chacha.add_noise(pieces[first:end], 2.6, F32, KEY, first=first, kernel=True)
    assert torch.equal(pieces, whole)


def test_noise_of_another_key_or_tile_is_another():
    flats = torch.zeros(2, 2 * chacha.TILE, dtype=F64, device=DEVICE)
    for flat, key in zip(flats, (KEY, KEY[:-1] + bytes(1)), strict=True):
        chacha.add_noise(flat, 1.0, F64, key, kernel=True)
    assert len(flats.unique()) == flats.numel()


def test_rounding_to_the_grid_is_that_of_the_torch_operations():
    """Sums that are far larger than the noise, on the grid, next to it, or zero with a sign."""
    g = spacing(1.0, F32)
    few = torch.tensor([0.0, -0.0, g, -g, 1.5 * g, -1.5 * g, 1e9, -1e9, 1e30, -1e-38, 1e-45])
    found = few.repeat(3).to(DEVICE)
    wanted = found.clone()
    chacha.add_noise(found, 1.0, F32, KEY, kernel=True)
    chacha.add_noise(wanted, 1.0, F32, KEY, kernel=False)
    assert ((found.double() - wanted.double()).abs() <= g).all()
    assert not (found.signbit() & (found == 0)).any()


# Norms


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (2, 2049), (1, rounding._PART + 5)])
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e-40, 1e16])
def test_squares_are_never_below_the_truth(shape, scale, dtype, by_kernel):
    """1e-40: numbers that are not normal in float32; 1e-22: numbers whose squares are not."""
    t = (random(*shape, dtype=F64) * scale).to(dtype)
    exact = t.double().square().sum(1)
    for function in (rounding.row_squares, rounding.squares):
        found = function(t)
        assert found.dtype is F64
        assert (found >= exact * (1 - 1e-12)).all()
        assert (found <= exact * (1 + 1e-6) + 2 * shape[1] * TINY).all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_squares_of_what_is_not_finite_are_not(bad, dtype, by_kernel):
    t = torch.ones(5, rounding._PART + 1, dtype=dtype, device=DEVICE)
    t[1, 0] = t[3, -1] = bad
    t[4] = 0.0
    assert rounding.row_squares(t).isfinite().tolist() == [True, False, True, False, True]
    assert rounding.row_squares(t)[4] < 1e-30


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 2, 1), (3, 16, 32), (2, 17, 33), (2, 40, 130)])
@pytest.mark.parametrize("scale", [1.0, 1e-22, 1e16])
def test_sums_over_positions_err_by_less_than_their_bound(shape, scale, dtype, by_kernel):
    h = (random(*shape, dtype=F64) * scale).to(dtype)
    h[:, -1] = -h[:, 0]  # so that they cancel
    sums, squared = rounding.position_sums(h)
    exact = h.double().sum(1)
    assert sums.dtype is F32
    error = (sums.double() - exact).norm(dim=1)
    assert (error <= rounding.sum_error(shape[1], F32) * h.double().norm(dim=2).sum(1)).all()
    whole = h.double().square().sum((1, 2))
    assert (squared >= whole * (1 - 1e-12)).all()
    assert (squared <= whole * (1 + 1e-6) + 2 * shape[1] * shape[2] * TINY).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 3e38])
def test_sums_over_positions_say_what_is_not_finite(bad, by_kernel):
    h = random(4, 18, 34)
    h[1, -1, -1], h[3, 0, 0] = bad, -bad
    assert rounding.position_sums(h)[1].isfinite().tolist() == [True, False, True, False]


# Steps of the clip


def both(function, monkeypatch):
    """Return what kernels give, and what torch operations do."""
    found = function()
    monkeypatch.setattr(fused, "_fused", lambda *tensors: None)
    return found, function()


SPECIAL = torch.tensor(
    [0.0, 5e-324, 1e-300, 1e-30, 0.3, 1.0, 1e30, 1e300, torch.inf, torch.nan],
    dtype=F64, device=DEVICE,
)  # fmt: skip


@pytest.mark.parametrize("size", [1, 255, 256, 257])
@pytest.mark.parametrize("clip", [1e-18, 0.3, 1e12, torch.inf])
def test_clip_factors_are_those_of_the_torch_operations(size, clip, by_kernel, monkeypatch):
    norms = torch.cat([random(size, dtype=F64).abs(), SPECIAL])
    found, wanted = both(lambda: fused.clip_factors(norms, clip), monkeypatch)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    assert found[-2:].tolist() == [0.0, 0.0]
    kept = (found * norms)[:-2]
    assert (kept <= clip * (1 + 1e-15)).all()
    assert (found <= 1).all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("size", [1, 257])
def test_totals_are_those_of_the_torch_operations(parts, size, by_kernel, monkeypatch):
    given = random(parts, size + len(SPECIAL), dtype=F64).abs()
    given[-1, size:] = SPECIAL
    (found, bad), (wanted, expected) = both(lambda: fused.total_of(given, 1.0006), monkeypatch)
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=0)  # the factor is a float32
    assert (found >= given.sum(0).nan_to_num(0.0, 0.0)).all()
    assert torch.equal(bad, expected)
    assert bad[-2:].all()
    assert not bad[:-2].any()


def test_other_steps_are_those_of_the_torch_operations(by_kernel, monkeypatch):
    values = torch.cat([random(300, dtype=F64).abs(), SPECIAL])
    squared = values.flip(0).contiguous()
    found, wanted = both(lambda: fused.with_roots(values, squared, 1e-6), monkeypatch)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0, equal_nan=True)
    assert not (found < values * (1 - 1e-15)).any()


@pytest.mark.parametrize("dtype", [F32, F64])
def test_weights_of_bad_examples_are_zero(dtype, by_kernel, monkeypatch):
    weights, bad = random(300, dtype=F64), torch.arange(300, device=DEVICE) % 7 == 0
    weights[7] = torch.nan
    found, wanted = both(lambda: fused.row_weights(weights, bad, dtype), monkeypatch)
    assert found.dtype is dtype
    assert torch.equal(found, wanted)
    assert (found[bad] == 0).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 70, 1025), (3, 2048, 3)])
def test_rows_are_scaled_and_left_out(shape, by_kernel):
    batch, wide, narrow = shape
    g, a, w = random(batch, narrow), random(batch, 1, wide, seed=1), random(batch, seed=2)
    wanted = g * w[:, None], a.clone()
    if batch > 2:
        w[2] = wanted[0][2] = wanted[1][2] = 0.0
        g[2], a[2] = torch.nan, torch.inf
    for found, exact in zip(fused.scaled_rows(g, a, w), wanted, strict=True):
        assert torch.equal(found, exact)


# Sums


@pytest.mark.parametrize("batch", [1, 17, 129, 512])
@pytest.mark.parametrize("columns", [1, 33])
def test_weighted_sums_leave_out_what_has_no_weight(batch, columns, by_kernel):
    rows, w = random(batch, columns), random(batch, seed=1).abs()
    w[0] = 0.0
    exact = (w.double()[1:] @ rows.double()[1:])[None]
    rows[0] = torch.nan
    bad = rows.isnan().any(1)
    assert rounding.weighable(rows, bad, exact=False) is rows
    found = rounding.summed_rows(w[:, None], rows)
    largest = (rows[1:].norm(dim=1) * w[1:]).max() if batch > 1 else 0.0
    assert (found.double() - exact).norm() <= rounding.rows_error(batch, F32) * largest
    assert torch.equal(rounding.summed_rows(torch.zeros_like(w)[:, None], rows), found * 0.0)


def test_weighted_sums_of_long_rows_leave_out_what_has_no_weight(by_kernel):
    rows, w = random(19, rounding._LONG + 3), random(19, seed=1)
    w[4], rows[4] = 0.0, torch.inf
    exact = w.double() @ rows.double().nan_to_num(0.0, 0.0, 0.0)
    found = rounding._weighted_on_gpu(w, rows)[0].double()
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


# Gradients that are never stored


@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 33, 20, 130), (4, 70, 129, 9)])
def test_tiles_have_their_norms_and_sums(size):
    """What is summed is a multiple of what was measured; not finite ones are left out.

    The interpreter cannot multiply bfloat16, so there the same numbers are float32.
    """
    batch, positions, rows, columns = size
    held = BF16 if DEVICE.type == "cuda" else F32
    g = random(batch, positions, rows, dtype=BF16).to(held)
    a = random(batch, positions, columns, dtype=BF16, seed=1).to(held)
    exact = torch.einsum("btr,btc->brc", g.double(), a.double())
    found = tiles.tile_squares(g, a)
    sizes = (g.double().norm(dim=2) * a.double().norm(dim=2)).sum(1)
    bound = (found.sqrt() + tiles.tile_error(positions) * sizes).square()
    whole = exact.flatten(1).square().sum(1)
    assert (bound * rounding.INFLATION**2 >= whole).all()
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-30)
    w = random(batch, seed=2)
    w[0] = 0.0
    g[0] = torch.nan
    wanted = torch.einsum("b,brc->rc", w.double(), exact)
    torch.testing.assert_close(tiles.tile_sums(g, a, w).double(), wanted, rtol=1e-4, atol=1e-4)
    assert tiles.tile_squares(g, a).isfinite().tolist() == [i > 0 for i in range(batch)]


def test_one_bit_is_seen():
    one = random(5000).view(torch.int64)
    for at in (None, 0, 2048, len(one) - 1):
        two, flag = one.clone(), torch.zeros((), dtype=torch.int32, device=DEVICE)
        if at is not None:
            two[at] ^= 1
        kernels.differs_kernel[(-(-len(one) // 2048),)](one, two, flag, len(one), BLOCK=2048)
        assert bool(flag) == (at is not None)


# Networks


def tokens():
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(3, 6), blocks, nn.Flatten(), nn.Linear(30, 3))


def images():
    return nn.Sequential(
        nn.Unflatten(2, (1, 3)), nn.Conv2d(5, 4, (1, 2)), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


CASES = {
    "mlp": (lambda: nn.Sequential(nn.Flatten(), dpbnn.mlp(15, (9,), 3)), {}),
    "gaussian": (
        lambda: dpbnn.to_gaussian(nn.Sequential(nn.Flatten(), dpbnn.mlp(15, (9,), 3))),
        {"space": "parameters"},
    ),
    "images": (images, {}),
    "tokens": (tokens, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_norms_and_sums_of_networks_are_those_of_the_torch_operations(name, monkeypatch, request):
    """Also with examples that are not finite: they have no norm, and no part in a sum."""
    make, options = CASES[name]
    torch.manual_seed(0)
    x, y = random(7, 5, 3), torch.arange(7, device=DEVICE) % 3
    x[2], x[5, 1, 1] = torch.nan, torch.inf
    attached = dpbnn.attach(make().to(DEVICE), "categorical", **options)
    draws, w = attached.draw(), random(7, seed=1).abs()

    def taken():
        c = attached(x, y, draws=draws)
        alone = [c.weighted_sum(row) for row in torch.eye(7, device=DEVICE)]
        return c.norms(), c.weighted_sum(w), alone

    if DEVICE.type == "cuda":
        with pytest.MonkeyPatch.context() as patch:
            for module in (chacha, fused, rounding, tiles):
                patch.setattr(module, "triton_kernels", lambda: None)
            norms, sums, _ = taken()
    else:
        norms, sums, _ = taken()
        request.getfixturevalue("by_kernel")
    found, own, alone = taken()
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
    assert found[2] == found[5] == 0
    for key, value in sums.items():
        torch.testing.assert_close(own[key].double(), value.double(), rtol=1e-3, atol=1e-5)
    for norm, sum_of_one in zip(found, alone, strict=True):
        assert torch.cat([v.flatten().double() for v in sum_of_one.values()]).norm() <= norm
