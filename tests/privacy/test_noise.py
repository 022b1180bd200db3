"""Noise: exact scale and tails, no two draws alike, no trace of the key.

Tests marked `os_entropy` are of sources as users have them, and state how often they fail by
chance; the keys of the others repeat. Each is run once against a wrong version that it must reject.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from false_alarms import LEVEL
from forks import exit_code, started
from scipy import stats
from torch import Tensor

from dpbnn.privacy import stream
from dpbnn.privacy.grid import spacing
from dpbnn.privacy.noise import NoiseSource

pytestmark = pytest.mark.long

SHAPES = {"w": (400, 300), "b": (401,), "v": (400, 300), "s": ()}


def zeros(
    shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def draw(source: NoiseSource, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return source.normal({"x": torch.empty(n, dtype=dtype)}, 1.0)["x"]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def correlated(a: Tensor, b: Tensor, level: float = 6e-5) -> bool:
    """Whether |correlation| is that of independent numbers less often than the level says."""
    r = np.corrcoef(a.flatten().double().numpy(), b.flatten().double().numpy())[0, 1]
    return bool(abs(r) >= stats.norm.isf(level / 2) / math.sqrt(a.numel()))


@pytest.fixture(params=["aes", "shake"])
def _both_generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "shake":
        monkeypatch.setattr(stream, "_LIBCRYPTO", None)
    elif stream._LIBCRYPTO is None:
        pytest.skip("this Python's OpenSSL is out of reach")


# Distribution


@pytest.mark.os_entropy(3 * LEVEL)
@pytest.mark.usefixtures("_both_generators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_tensor_has_the_declared_std_and_no_other(dtype: torch.dtype) -> None:
    """KS per tensor; 1.05 std at n = 250 000 is missed less often than once in 10^13 runs."""
    like = zeros({"w": (500, 500), "b": (401,), "v": (500, 500), "s": ()}, dtype)
    released = NoiseSource().normal(like, {"w": 0.3, "b": 2.0, "v": 1e-3, "s": 1.0})
    for name, std in (("w", 0.3), ("b", 2.0), ("v", 1e-3)):
        x = released[name].flatten().numpy()
        assert stats.kstest(x, stats.norm(scale=std).cdf).pvalue > LEVEL
        if x.size > 10_000:
            assert stats.kstest(x, stats.norm(scale=1.05 * std).cdf).pvalue < LEVEL


def suspicious(x: np.ndarray) -> list[str]:
    """Names of the tests of N(0, 1) that x fails, each at a level of 1e-8 or less.

    6.5 standard deviations are 8e-11 for a normal mean; that of x^6 has a tail six times as heavy.
    """
    found = []
    mean_and_variance = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170)}
    for k, (mean, variance) in mean_and_variance.items():
        if abs((x**k).mean() - mean) > 6.5 * math.sqrt(variance / x.size):
            found.append(f"moment {k}")
    edges = np.r_[-np.inf, stats.norm.ppf(np.linspace(0, 1, 1001)[1:-1]), np.inf]
    if stats.chisquare(np.histogram(x, edges)[0]).pvalue < LEVEL:
        found.append("chi-squared")
    return found


@pytest.mark.os_entropy(6 * LEVEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_and_chi_squared(dtype: torch.dtype) -> None:
    x = draw(NoiseSource(), 2_100_001, dtype).double().numpy()
    assert suspicious(x) == []
    assert np.unique(x[:100_000]).size > 96_000  # 97 300 on the grid of float32
    assert "moment 2" in suspicious(1.01 * x)
    assert "moment 4" in suspicious(0.98 * x + 0.02 * x**3 / 3)


@pytest.mark.os_entropy(5 * LEVEL)
def test_tails_of_forty_million_draws() -> None:
    """Counts beyond 3, 4, 5 sigma against Poisson; no count beyond 5 is rejected for certain."""

    def too_many_or_few(clip: float) -> list[float]:
        source, n, thresholds = NoiseSource(), 10_000_000, (3.0, 4.0, 5.0)
        counts = np.zeros(3)
        for _ in range(4):
            x = draw(source, n).abs_().clamp_(max=clip)
            counts += [int((x > t).sum()) for t in thresholds]
        expected = 4 * n * 2 * stats.norm.sf(thresholds)
        low = stats.poisson.cdf(counts, expected)
        high = stats.poisson.sf(counts - 1, expected)
        return [t for t, a, b in zip(thresholds, low, high, strict=True) if 2 * min(a, b) < LEVEL]

    assert too_many_or_few(clip=math.inf) == []
    assert too_many_or_few(clip=4.999) == [5.0]


@pytest.mark.usefixtures("_both_generators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 1001, 2 * 1500 + 7])
def test_noise_is_box_and_mullers_of_the_stream(
    n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z_i = sqrt(-2 ln u_i) cos 2 pi v_i, then the sines, chunk by chunk; down to the grid."""
    monkeypatch.setattr(stream, "_PAIRS", 1024)
    source, kind = NoiseSource.seeded(5), f"i{dtype.itemsize}"
    key, scale = source._stream_key(str(dtype)), 2.0 ** (8 * dtype.itemsize)
    expected, radii = [], []
    for begin in range(0, n, 2048):
        size = min(2048, n - begin)
        words = np.empty(stream.word_bytes(size, dtype), np.uint8)
        stream.fill(key, begin * dtype.itemsize, words)
        first, second = np.split(words.view(kind), 2)
        u = (first.view(f"u{dtype.itemsize}") if dtype == torch.float32 else first) / scale
        u = u + (2.0**-33 if dtype == torch.float32 else 0.5)
        radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * second / scale
        expected.append(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size])
        radii.append(np.tile(radius, 2)[:size])
    x = draw(source, n, dtype).double().numpy()
    rounding = torch.finfo(dtype).eps * (16 + 4 / np.concatenate(radii))
    half = spacing(1.0, dtype) / 2
    assert (np.abs(x + half - np.concatenate(expected)) < half + rounding).all()


def test_float64_noise_has_float64_resolution() -> None:
    x = draw(NoiseSource(), 10_000, torch.float64)
    assert (x != x.float().double()).float().mean() > 0.99


def test_radius_beyond_32_bits_is_continued_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """P(R > r) = exp(-r^2) holds below u = 2^-32, where 32-bit words end (R = 4.71)."""
    edge = stream._EDGE
    words = np.tile(np.arange(edge, dtype=np.uint32), 16)
    drawn = np.concatenate([np.full(64, 2**31, np.uint32), words]).view(np.uint8)

    def fill(key: bytes, offset: int, out: np.ndarray) -> None:
        out[:] = drawn[offset : offset + out.size]

    monkeypatch.setattr(stream, "fill", fill)
    radius = torch.full((words.size,), 4.0)
    stream._extend(b"k" * 16, 64, radius)
    u = np.exp(-(radius.double().numpy() ** 2)) * 2.0**32
    assert np.abs(u - words - 0.5).max() < 0.5 * (1 + 1e-2)
    fraction = (u - words)[words < 64]
    assert stats.kstest(fraction, "uniform").pvalue > 1e-5
    assert radius.max() > math.sqrt(math.log(2**32))
    drawn = np.array([edge, 2**32 - 1, 2**31, 2**20, 0, 0, 0, 0], np.uint32).view(np.uint8)
    untouched = torch.full((4,), 4.0)
    stream._extend(b"k" * 16, 0, untouched)
    assert (untouched == 4).all()


def test_the_first_radii_tell_which_words_need_more_bits() -> None:
    words = torch.tensor([0, 1, stream._EDGE - 1, stream._EDGE], dtype=torch.float32)
    radii = (stream._MOST / words).log().sqrt()
    assert (radii[:3] > stream._FAR).all()
    assert radii[3] - 0.01 < stream._FAR


def test_extreme_words_give_finite_radii(monkeypatch: pytest.MonkeyPatch) -> None:
    for byte in (0, 255, 127, 128):
        monkeypatch.setattr(stream, "fill", lambda key, offset, out, byte=byte: out.fill(byte))
        for dtype in (torch.float32, torch.float64):
            x = draw(NoiseSource(), 11, dtype)
            assert torch.isfinite(x).all()
            assert x.any()


# Independence


def test_tensors_steps_halves_and_sources_are_uncorrelated() -> None:
    a, b = NoiseSource.seeded(1), NoiseSource.seeded(2)
    first, second, other = a.normal(zeros(), 1.0), a.normal(zeros(), 1.0), b.normal(zeros(), 1.0)
    b.prepare(zeros(), ahead=True)
    ahead = b.normal(zeros(), 1.0)
    draws = {
        f"{k} {name}": d[name]
        for k, d in enumerate((first, second, other, ahead))
        for name in ("w", "v")
    }
    names = list(draws)
    for i, x in enumerate(names):
        for y in names[:i]:
            assert not correlated(draws[x], draws[y]), (x, y)
    for x in draws.values():
        assert not correlated(x[:200], x[200:])
        assert not correlated(x[:, :150], x[:, 150:])
        assert not correlated(x[:200] ** 2, x[200:] ** 2)
    mixed = 0.02 * first["w"] + second["w"]
    assert correlated(first["w"], mixed)


def test_chunks_of_one_release_are_uncorrelated() -> None:
    n = stream._PAIRS
    x = draw(NoiseSource.seeded(1), 6 * n)
    parts = x.view(6, n)
    for i in range(6):
        for j in range(i):
            assert not correlated(parts[i], parts[j])
            assert i // 2 == j // 2 or not correlated(parts[i] ** 2, parts[j] ** 2)
        assert not correlated(parts[i][1:], parts[i][:-1])
    radii = parts[0] ** 2 + parts[1] ** 2
    assert stats.kstest(radii[:100_000].numpy(), stats.chi2(2).cdf).pvalue > 1e-5


def test_a_source_that_forgets_the_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseSource, "_stream_key", lambda self, use: b"k" * 16)
    source = NoiseSource()
    assert correlated(draw(source, 10_000), draw(source, 10_000))


def test_purposes_share_a_key_but_no_noise() -> None:
    key = NoiseSource().key
    a, b = (NoiseSource.from_key(key, purpose=p) for p in ("chain 0", "chain 1"))
    assert not correlated(draw(a, 100_000), draw(b, 100_000))


@pytest.mark.os_entropy(LEVEL)
def test_another_process_draws_other_noise() -> None:
    code = (
        "import sys, torch; from dpbnn.privacy.noise import NoiseSource; torch.manual_seed(0);"
        "x = NoiseSource().normal({'x': torch.empty(40000)}, 1.0)['x'];"
        "sys.stdout.buffer.write(x.numpy().tobytes())"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in "ab"]
    a, b = (torch.frombuffer(bytearray(r.communicate()[0]), dtype=torch.float32) for r in runs)
    assert a.std() > 0.9
    assert not correlated(a, b, LEVEL)


def in_fork(child: Callable[[], bytes]) -> bytes:
    """What a fork returns."""
    reader, writer = os.pipe()
    pid = started(lambda: os.write(writer, child()))
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    assert exit_code(pid) == 0
    return data


@pytest.mark.os_entropy(LEVEL)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_forked_process_is_rekeyed(ahead: bool) -> None:
    source = NoiseSource()
    like = {"x": torch.empty(4000)}
    draw(source, 4000)
    source.prepare(like, ahead=ahead)
    key = source.key
    data = in_fork(lambda: draw(source, 4000).numpy().tobytes() + source.key)
    theirs = torch.frombuffer(bytearray(data[:-32]), dtype=torch.float32)
    assert data[-32:] != key
    assert source.key == key
    assert theirs.std() > 0.9
    assert not correlated(theirs, draw(source, 4000), LEVEL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_seeded_source_refuses() -> None:
    source = NoiseSource.seeded(0)

    def child() -> bytes:
        try:
            draw(source, 4)
        except RuntimeError as error:
            return str(error).encode()
        return b"drew"

    assert b"another seed" in in_fork(child)


# Other generators


@pytest.mark.os_entropy(LEVEL)
def test_global_seeds_and_noise_do_not_touch_each_other() -> None:
    def seed_all(seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)

    seed_all(0)
    a, private_a = draw(NoiseSource.seeded(1), 999), draw(NoiseSource(), 40_000)
    seed_all(0)
    b, private_b = draw(NoiseSource.seeded(1), 999), draw(NoiseSource(), 40_000)
    seed_all(7)
    c = draw(NoiseSource.seeded(1), 999)
    assert torch.equal(a, b)
    assert torch.equal(a, c)
    assert not correlated(private_a, private_b, LEVEL)

    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    source = NoiseSource()
    source.prepare(zeros(), ahead=True)
    source.normal(zeros(), 1.0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1][1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()


# Key, step, draws


@pytest.mark.usefixtures("_both_generators")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drawn_ahead_equals_drawn_now(dtype: torch.dtype) -> None:
    shapes = {"a": (stream._PAIRS + 3, 3), "b": (7,), "e": (0, 4), "c": ()}
    ahead, now = NoiseSource.seeded(3), NoiseSource.seeded(3)
    seen = []
    for _ in range(3):
        ahead.prepare(zeros(shapes, dtype), ahead=True)
        seen.append(ahead.normal(zeros(shapes, dtype), 0.5))
        assert equal(seen[-1], now.normal(zeros(shapes, dtype), 0.5))
    assert not correlated(seen[0]["a"], seen[1]["a"])
    assert not correlated(seen[1]["a"], seen[2]["a"])


def test_what_was_drawn_ahead_is_used_once_or_thrown_away() -> None:
    plain, source = NoiseSource.seeded(3), NoiseSource.seeded(3)
    expected = [plain.normal(zeros(), 1.0) for _ in range(3)]
    source.prepare({"x": torch.empty(5)}, ahead=True)
    assert equal(source.normal(zeros(), 1.0), expected[0])
    source.prepare(zeros(), ahead=True)
    source.prepare(zeros(), ahead=True)
    assert equal(source.normal(zeros(), 1.0), expected[1])
    assert source._ahead is None
    assert equal(source.normal(zeros(), 1.0), expected[2])


def test_one_draw_per_release() -> None:
    source = NoiseSource()
    source.prepare(zeros(), ahead=True)
    assert (source.draws, source.step) == (0, 0)
    source.add(zeros(), 1.0)
    source.add(zeros(), 1.0)
    assert (source.draws, source.step) == (2, 2)


def test_a_release_that_fails_is_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    source = NoiseSource()
    tensors = zeros()
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "_add_on_devices", fail)
        with pytest.raises(MemoryError):
            source.add(tensors, 1.0)
    assert source.step == 1
    assert not correlated(tensors["w"], source.normal(zeros(), 1.0)["w"])


@pytest.mark.usefixtures("_both_generators")
def test_resumed_source_continues_the_uninterrupted_one() -> None:
    source = NoiseSource()
    for _ in range(2):
        source.normal(zeros(), 1.0)
    key, step = source.key, source.step
    releases = [None, None, *(source.normal(zeros(), 1.0) for _ in range(2))]
    resumed = NoiseSource.from_key(key, step)
    assert equal(resumed.normal(zeros(), 1.0), releases[2])
    assert equal(resumed.normal(zeros(), 1.0), releases[3])
    assert (resumed.step, resumed.draws) == (4, 2)
    assert resumed.key == source.key != NoiseSource().key
    with pytest.raises(ValueError, match="32 bytes"):
        NoiseSource.from_key(b"short", 2)


@pytest.mark.usefixtures("_both_generators")
def test_streams_are_addressed_by_offset() -> None:
    whole, part = np.empty(4096, np.uint8), np.empty(1024, np.uint8)
    stream.fill(b"k" * 16, 0, whole)
    stream.fill(b"k" * 16, 2048, part)
    assert (whole[2048:3072] == part).all()
    stream.fill(b"l" * 16, 2048, part)
    assert (whole[2048:3072] != part).any()


def test_the_key_never_shows() -> None:
    source = NoiseSource()
    source.prepare(zeros(), ahead=True)
    draw(source, 3)
    for text in (repr(source), str(source), source.source):
        assert source.key.hex() not in text
        assert repr(source.key) not in text
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pickled or copied") as error:
            leak(source)
        assert repr(source.key) not in str(error.value)


def test_statement_fields() -> None:
    assert NoiseSource().private
    assert NoiseSource().source.startswith("operating-system entropy, ")
    assert not NoiseSource.seeded(0).private
    assert NoiseSource.seeded(0).source == "seeded (debug)"
    assert not NoiseSource.from_key(NoiseSource.seeded(0).key, 5).private
    assert not NoiseSource.from_key(NoiseSource.seeded(0, 5).key, 5).private
    assert NoiseSource.from_key(NoiseSource().key).private


# Shapes and arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_shape_and_layout_gets_noise_on_every_element(dtype: torch.dtype) -> None:
    for n in (0, 1, 2, 3, 2 * stream._PAIRS - 1, 2 * stream._PAIRS + 1):
        assert (draw(NoiseSource(), n, dtype) == 0).sum() <= n * 1e-5  # 8e-7 of float32's are 0
    base = torch.zeros(6, 50, 40, dtype=dtype)
    tensors = {
        "empty": torch.zeros(0, 3, dtype=dtype),
        "scalar": torch.zeros((), dtype=dtype),
        "transposed": base[0:2].permute(2, 0, 1),
        "strided": base[3, :, ::2],
        "leaf": torch.zeros(5, dtype=dtype, requires_grad=True),
    }
    NoiseSource().add(tensors, 1.0)
    assert all((tensor != 0).all() for tensor in tensors.values())
    assert (base[2] == 0).all()
    assert (base[3, :, 1::2] == 0).all()


def test_inference_mode_and_default_device_leave_no_trace() -> None:
    source = NoiseSource()
    with torch.inference_mode():
        draw(source, 5)
    with torch.device("meta"):
        assert torch.isfinite(source.normal({"x": torch.empty(5, device="cpu")}, 1.0)["x"]).all()
    assert (draw(source, 5) != 0).all()


def test_mixed_dtypes_in_one_release() -> None:
    tensors = {"a": torch.zeros(20_000), "b": torch.zeros(20_000, dtype=torch.float64)}
    source = NoiseSource()
    source.prepare(tensors, ahead=True)
    source.add(tensors, 1.0)
    assert source.draws == 1
    assert not correlated(tensors["a"], tensors["b"])


def test_noise_is_added_to_what_is_there() -> None:
    tensors = {"x": torch.full((10_000,), 5.0), "y": torch.full((3,), 2.0)}
    NoiseSource().add(tensors, {"x": 0.1, "y": 0.0})
    assert abs(tensors["x"].mean() - 5) < 0.01
    assert (tensors["y"] == 2).all()


@pytest.mark.parametrize(
    "std", [-1.0, math.nan, math.inf, {"x": 1.0}, {"x": 1.0, "y": 1.0, "z": 1.0}]
)
def test_bad_std_is_refused_before_anything_is_drawn(std: float | dict[str, float]) -> None:
    source = NoiseSource()
    with pytest.raises(ValueError, match="std"):
        source.add({"x": torch.zeros(2), "y": torch.zeros(2)}, std)
    assert (source.step, source.draws) == (0, 0)


def test_a_seeded_source_can_be_gone_on_with() -> None:
    source = NoiseSource.seeded(7)
    draw(source, 10)
    draw(source, 10)
    again = NoiseSource.seeded(7, 2)
    assert (again.key, again.step) == (source.key, source.step)
    assert torch.equal(draw(again, 10), draw(source, 10))


def test_float32_noise_for_float64_sums() -> None:
    """KS at level 1e-5; the noise is that of float32 tensors, the sum keeps its float64 digits."""
    start = torch.full((100_000,), 2.0**30, dtype=torch.float64)
    sums = {"x": start.clone()}
    ahead, now = NoiseSource.seeded(3), NoiseSource.seeded(3)
    ahead.prepare(sums, torch.float32, ahead=True)
    ahead.add(sums, 0.7, torch.float32)
    assert torch.equal(sums["x"] - start, now.normal({"x": torch.empty(100_000)}, 0.7)["x"])
    z = (sums["x"] - start).numpy()
    assert stats.kstest(z, stats.norm(scale=0.7).cdf).pvalue > 1e-5
    assert stats.kstest(z, stats.norm(scale=0.735).cdf).pvalue < 1e-5


def test_a_std_too_small_for_a_grid_is_refused_before_anything_is_drawn() -> None:
    source = NoiseSource()
    with pytest.raises(ValueError, match=r"std=1e-35.*larger clip"):
        source.add({"x": torch.zeros(2)}, 1e-35)
    assert (source.step, source.draws) == (0, 0)
    source.add({"x": torch.zeros(2, dtype=torch.float64)}, 1e-35)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_low_precision_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"float32 and float64.*\.float\(\)"):
        NoiseSource().add({"x": torch.zeros(2, dtype=dtype)}, 1.0)


def test_a_process_with_noise_under_way_ends_promptly() -> None:
    code = (
        "import torch; from dpbnn.privacy.noise import NoiseSource; s = NoiseSource();"
        "s.prepare({'x': torch.empty(2_000_000)}, ahead=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_noise_is_drawn_on_the_device() -> None:
    like = {"x": torch.empty(100_000, device="cuda"), "y": torch.empty(100_000, device="cuda")}
    state = torch.cuda.get_rng_state()
    source = NoiseSource()
    source.prepare(like)
    first, key = source.normal(like, 2.0), source.key
    second = source.normal(like, 2.0)
    resumed = NoiseSource.from_key(key, 1).normal(like, 2.0)
    assert all((t.double() / spacing(2.0, t.dtype) % 1 == 0).all() for t in first.values())
    assert equal(second, resumed)
    assert torch.equal(state, torch.cuda.get_rng_state())
    x, y, z = (t.cpu() for t in (first["x"], first["y"], second["x"]))
    assert stats.kstest(x.numpy(), stats.norm(scale=2.0).cdf).pvalue > 1e-5
    assert stats.kstest(x.numpy(), stats.norm(scale=2.1).cdf).pvalue < 1e-5
    assert not any(correlated(a, b) for a, b in ((x, y), (x, z), (y, z)))
