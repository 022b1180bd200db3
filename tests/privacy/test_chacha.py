"""Noise on GPUs: ChaCha20's own words, a function of key and position, never part of a graph.

Without a GPU the torch operations are tested on the CPU; with one, the kernel against them.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from torch import nn

import dpbnn
from dpbnn.contributions import rounding, tiles
from dpbnn.privacy import chacha, fused, slices
from dpbnn.privacy.grid import spacing
from dpbnn.privacy.noise import NoiseSource, Places

CPU = torch.device("cpu")
KEY, F32 = bytes(range(32)), torch.float32
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def noised(flat, std=1.0, dtype=torch.float32, key=KEY, **options):
    flat = flat.clone()
    chacha.add_noise(flat, std, dtype, key, **options)
    return flat


def test_the_words_are_those_of_rfc_8439():
    """Section 2.3.2 of the RFC: the block of counter 1."""
    nonce = bytes.fromhex("000000090000004a00000000")
    words = chacha.words(KEY, 1, 1, CPU, nonce).flatten()
    block = b"".join(int(word).to_bytes(4, "little") for word in words)
    assert block.hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


def test_a_part_of_the_stream_can_be_drawn_by_itself():
    whole = chacha.normals(KEY, 0, 10 * chacha.TILE, CPU)
    part = chacha.normals(KEY, 3 * chacha.TILE, 1500, CPU)
    assert torch.equal(part, whole[3 * chacha.TILE :][:1500])
    assert len(whole.unique()) == len(whole)
    assert not torch.equal(whole, chacha.normals(bytes(32), 0, 10 * chacha.TILE, CPU))
    with pytest.raises(ValueError, match="positions"):
        chacha.words(KEY, 2**32 - 4, 4, CPU)
    for kernel in (False, True):
        with pytest.raises(ValueError, match="positions"):
            chacha.add_noise(torch.empty(2**35, device="meta"), 1.0, F32, KEY, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("grid", [torch.float32, torch.float64])
def test_noise_has_its_scale_and_lies_on_the_grid(dtype, grid):
    """The key is fixed; a scale that is 5 % off is seen."""
    if (dtype, grid) == (torch.float32, torch.float64):
        pytest.skip("sums are float64 where the noise is")
    x = noised(torch.full((100_000,), 1 / 3, dtype=dtype), 2.6, grid).double()
    assert (x / spacing(2.6, grid) % 1 == 0).all()
    assert stats.kstest((x - 1 / 3).numpy(), stats.norm(scale=2.6).cdf).pvalue > 1e-5
    assert stats.kstest((x - 1 / 3).numpy(), stats.norm(scale=2.73).cdf).pvalue < 1e-5


def test_the_low_bits_of_the_noise_are_uniform():
    steps = noised(torch.zeros(1 << 21)).double() / spacing(1.0, torch.float32)
    counts = torch.bincount(steps.long() % 16, minlength=16)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-5


def test_zeros_have_no_sign():
    tiny = torch.tensor([-1e-30, 1e-30, -0.0] * 1000)
    x = noised(tiny, 1e-25)
    assert not (x.signbit() & (x == 0)).any()


def test_views_of_one_buffer_are_known_as_such():
    flat, views = chacha.flat_views({"a": (3, 5), "b": (), "c": (2000,)}, torch.float32, CPU)
    tensors = list(views.values())
    found = chacha.shared_flat(tensors)
    assert (found.data_ptr(), len(found)) == (flat.data_ptr(), len(flat))
    assert chacha.shared_flat(tensors[1:]).data_ptr() == tensors[1].data_ptr()
    assert chacha.shared_flat(tensors[::-1]) is None
    assert chacha.shared_flat([*tensors, torch.zeros(3)]) is None
    assert chacha.shared_flat([torch.zeros(3)]) is None  # no room for a whole tile
    assert chacha.shared_flat([torch.zeros(5000)[:1000]]) is None  # others have the rest of it
    assert chacha.shared_flat([flat[: chacha.TILE].view(32, 32).T]) is None
    assert all(view.data_ptr() % 16 == 0 for view in tensors)


def test_noise_is_not_drawn_while_a_graph_is_captured(monkeypatch):
    """The attack: a key that is part of a graph gives the same noise at every replay."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="every replay would add the same"):
        chacha.add_noise(SimpleNamespace(is_cuda=True), 1.0, torch.float32, KEY)


def test_a_tensor_of_the_cpu_is_never_given_to_a_kernel(monkeypatch):
    """A kernel would take its address for one of a GPU."""

    def refuse():
        raise AssertionError("a kernel was asked for")

    for module in (chacha, fused, rounding, tiles):
        monkeypatch.setattr(module, "triton_kernels", refuse)
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    blocks = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    attached = dpbnn.attach(nn.Sequential(blocks, nn.Flatten(), nn.Linear(30, 3)), "categorical")
    x = torch.rand(4, 5, 6)
    x[1] = torch.nan
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            c = attached(x, torch.arange(4) % 3)
            sums = c.weighted_sum(fused.clip_factors(c.norms(), 0.1))
        NoiseSource().add(sums, 1.0)
        chacha.add_noise(torch.zeros(5), 1.0, torch.float32, KEY)


@gpu
def test_a_graph_that_holds_its_noise_is_refused_and_would_repeat_it(monkeypatch):
    """The same on a device; with the check taken out, two replays do share their noise."""
    flat, source = torch.zeros(5000, device="cuda"), NoiseSource()
    source.add({"x": flat}, 1.0)  # compiles
    with pytest.raises(RuntimeError, match="same"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        source.add({"x": flat}, 1.0)
    torch.cuda.synchronize()
    capturing = torch.cuda.is_current_stream_capturing
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chacha.add_noise(flat, 1.0, torch.float32, KEY)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    found = []
    for _ in range(2):
        flat.zero_()
        graph.replay()
        found.append(flat.clone())
    assert torch.equal(*found)


@gpu
@pytest.mark.parametrize(("dtype", "grid"), [
    (torch.float32, torch.float32), (torch.float64, torch.float32), (torch.float64, torch.float64),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 1000, 1024, 300_001])
def test_the_kernel_adds_what_the_torch_operations_add(dtype, grid, size):
    """Up to one step of the grid, where the last bit of a logarithm or a cosine decides."""
    sums = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 30
    slow, std = noised(sums, 2.6, grid), 2.6
    for kernel in (True, False):
        fast = noised(sums.cuda(), std, grid, kernel=kernel).cpu()
        steps = (fast.double() - slow.double()).abs() / spacing(std, grid)
        assert steps.max() <= 1
        assert (steps > 0).double().mean() < 1e-2


@gpu
def test_noise_of_many_tensors_is_that_of_their_buffer():
    shapes = {"w": (300, 77), "b": (5,), "s": (), "v": (4096,)}
    device = torch.device("cuda")
    _, views = chacha.flat_views(shapes, torch.float32, device)
    apart = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    one, two = NoiseSource.seeded(4), NoiseSource.seeded(4)
    one.add(views, 1.5)
    two.add(apart, 1.5)
    assert all(torch.equal(views[name], apart[name]) for name in shapes)
    assert NoiseSource().source != one.source
    fresh = NoiseSource()
    fresh.add(views, 1.0)
    assert "ChaCha20" in fresh.source


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=gpu)])
def test_pieces_get_the_noise_that_they_would_get_in_the_whole(monkeypatch, device):
    """Pieces that begin and end anywhere, one of them empty, one within a tile."""
    monkeypatch.setattr(chacha, "_TOGETHER", 2 * chacha.TILE)
    sums = torch.randn(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = noised(sums.to(device))
    cuts = [0, 5, 5, 1024, 1030, 1040, 5000, 9000]
    for first, end in itertools.pairwise(cuts):
        if first == end:
            continue
        piece = noised(sums[first:end].to(device), first=first)
        assert torch.equal(piece, whole[first:end])
    with pytest.raises(ValueError, match="positions"):
        chacha.add_noise(torch.zeros(5), 1.0, F32, KEY, first=2**35)


@gpu
def test_a_source_on_a_gpu_adds_to_pieces_what_it_adds_to_the_whole():
    shapes = {"a": (7, 300), "b": (5,), "c": (3, 2000)}
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    zeros = {n: torch.zeros(s, device="cuda", dtype=torch.float64) for n, s in shapes.items()}
    NoiseSource.from_key(KEY, 3).add(zeros, 1.3, F32)
    for rank in range(3):
        own = slices.Slices({n: torch.Size(s) for n, s in shapes.items()}, rank, 3)
        rows = {n: torch.zeros_like(own.own(n, value)) for n, value in zeros.items()}
        slices.PartOfNoise(NoiseSource.from_key(KEY, 3), own).add(rows, 1.3, F32)
        assert all(torch.equal(rows[n], own.own(n, value)) for n, value in zeros.items())
    assert sum(sizes.values()) == sum(value.count_nonzero() for value in zeros.values())


def test_pieces_of_one_release_have_one_device_and_one_std():
    places = Places({"a": 0, "b": 2}, {"a": 5, "b": 5})
    assert places.starts() == {"a": 0, "b": 7}
    assert places.starts(8) == {"a": 0, "b": 10}
    pieces = {"a": torch.zeros(2), "b": torch.zeros(3)}
    for std, other in (({"a": 1.0, "b": 2.0}, "cpu"), (1.0, "meta")):
        given = {**pieces, "b": pieces["b"].to(other)}
        with pytest.raises(ValueError, match="pieces of a release have one"):
            NoiseSource().add(given, std, at=places)


@pytest.mark.parametrize(("first", "count"), [(3, 3), (-1, 2), (0, 6), (6, 0)])
def test_no_piece_reaches_into_the_noise_of_another(first, count):
    source, before = NoiseSource(), {"a": torch.zeros(count), "b": torch.zeros(5)}
    with pytest.raises(ValueError, match="'a' reaches into the noise of others"):
        source.add(before, 1.0, at=Places({"a": first, "b": 0}, {"a": 5, "b": 5}))
    assert not any(value.any() for value in before.values())
