"""Attacks on the digits of a release, items 45 and 46.

Tests that count are exact: they have no false alarms. The one statistical test raises one in 10^7
runs at most.
"""

import math

import broken_versions as broken
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from twins import fails_on, twins_of

import dpbnn
from dpbnn.contributions import DenseContributions, attach
from dpbnn.contributions.outer import Outer
from dpbnn.contributions.rounding import INFLATION, row_squares
from dpbnn.likelihoods import Gaussian as Normal
from dpbnn.privacy import grid, stream
from dpbnn.privacy.noise import NoiseSource
from dpbnn.privacy.sampling import FullBatch

SCALES = [1.0, 0.5, 2.0**-90, 2.0**60, 1.3, 0.7e-20, 3e17]  # powers of two, tiny, huge, others


def steps(release, std, drawn):
    """Return releases in units of the grid, as float64; whole numbers where they lie on it."""
    return release.double() / grid.spacing(std, drawn)


def off_grid(release, std, drawn):
    """Return the share of the coordinates that lie off the grid."""
    units = steps(release, std, drawn)
    return float((units != units.round()).double().mean())


@fails_on(45, broken.noise_is_added_as_it_is, broken.sums_are_not_rounded,
          broken.noise_is_not_rounded)  # fmt: skip
def test_item_45_all_releases_of_neighbours_lie_on_one_public_grid():
    """The attack: a release with digits that only one of the neighbouring sums can have."""
    for dtype, drawn in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.float64, torch.float32),
    ):
        for std in SCALES:
            for sum_ in (0.0, std, std / 3, -1e-3 * std, 1e4 * std / 7):
                tensors = {"x": torch.full((2000,), sum_, dtype=dtype)}
                NoiseSource().add(tensors, std, drawn)
                assert off_grid(tensors["x"], std, drawn) == 0
    for value in (0.0, 1 / 3, 1.0):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
        release = gate(DenseContributions(torch.full((1, 2000), value)))["value"]
        assert off_grid(release, 1.0, torch.float32) == 0


def small_multiples(release):
    """Return the share of the coordinates that are no multiple of 2^-24: no 1 + x is such."""
    return float((release.double() * 2**24 % 1 != 0).double().mean())


@fails_on(45, broken.noise_is_added_as_it_is)
def test_item_45_counts_of_neighbours_have_the_same_digits():
    """The attack that was seen: a count of 0 had digits that one of 1 cannot have, in 0.365."""
    for seed in range(20):
        shares = []
        for sum_ in (0.0, 1.0):
            tensors = {"x": torch.full((1000,), sum_)}
            NoiseSource.seeded(seed).add(tensors, 1.0)
            shares.append(small_multiples(tensors["x"]))
        assert shares == [0, 0]


@fails_on(45, broken.noise_lies_on_every_other_point, broken.noise_prefers_even_points)
def test_item_45_every_grid_point_has_its_noise():
    """The attack: the last bits of a release are those of the sum.

    The last four bits are uniform under both neighbours: chi-squared, at a level of 2e-8 each.
    """
    for drawn in (torch.float32, torch.float64):
        g = grid.spacing(1.0, drawn)
        for sum_ in (0.0, 5 * g):
            tensors = {"x": torch.full((100_000,), sum_, dtype=torch.float64)}
            NoiseSource().add(tensors, 1.0, drawn)
            last = steps(tensors["x"], 1.0, drawn).remainder(16).long()
            assert stats.chisquare(torch.bincount(last, minlength=16).numpy()).pvalue > 2e-8


@fails_on(45, broken.zeros_keep_their_sign)
def test_item_45_a_zero_does_not_show_the_sign_of_the_sum():
    sums, small = torch.tensor([-0.2, -0.0, 0.2, 0.0]), torch.tensor([-0.0, -0.0, -0.0, 0.3])
    stream.add_on_grid(sums, small, 1.0)
    assert not sums.signbit().any()


@fails_on(45, broken.the_clip_leaves_no_room_for_rounding)
@example(3, 0, 1 - 2**-11, 1000.0, 400)
@example(-55, 0, 2**-11, 1000.0, 400)
@given(
    st.integers(-100, 100),
    st.integers(0, 2),
    st.floats(0, 1),
    st.floats(1, 4e3),
    st.integers(1, 3000),
)
def test_item_45_rounding_moves_no_sum_beyond_the_sensitivity(point, fewer, offset, sigma, width):
    """The attack: in every coordinate one sum just below a grid point and one just above."""
    gate = dpbnn.Gate(clip=1.0, noise_multiplier=sigma)
    precision = gate._precision_of(DenseContributions(torch.zeros(1, width)), sigma)
    g = grid.spacing(sigma, precision.dtype)
    most = precision.share / math.sqrt(width) / g
    away = max(0.0, math.floor(most - 2**-10) + 2**-10 - fewer)
    first = torch.full((width,), point + offset, dtype=torch.float64).mul_(g)
    second = first + away * g
    for sums in (first, second):
        stream.add_on_grid(sums, torch.zeros(width), g)
    assert (first - second).norm() <= gate.sensitivity * (1 + 1e-12)


class Sums(DenseContributions):
    """Chunks whose sums are given, as if each were the sum of many records of norm 1."""

    def __init__(self, *sums):
        super().__init__(torch.tensor(sums)[:, None])

    def norms(self):
        return torch.zeros(self.batch_size, dtype=torch.float64)

    def chunks(self):
        for value in self._flat["value"]:
            yield Sums(float(value))


def moved(first, second):
    """Return how far the second release lies from the first, noise taken out."""
    results = []
    for contributions in (first, second):
        gate = dpbnn.Gate(clip=1.0, noise_multiplier=1.0)
        gate._precision = gate._precision_of(contributions, 1.0)
        with pytest.MonkeyPatch.context() as patch:
            add = stream.add_on_grid
            patch.setattr(stream, "add_on_grid", lambda sums, z, g: add(sums, z.zero_(), g))  # noqa: B023
            sums = gate._clipped_sum(contributions, None, [])
            results.append(gate._noised(sums, 1.0)["value"])
    return float((results[0].double() - results[1].double()).norm())


MANY = 2.0**24 + 2


@fails_on(46, broken.chunks_are_added_in_float32, broken.dense_sums_are_float32)
def test_item_46_one_of_millions_of_records_moves_the_sum_by_one():
    """The attack: above 2^24 float32 has even numbers only, and 1 more becomes 2 more."""
    assert moved(Sums(MANY), Sums(MANY, 1.0)) <= 1.0
    assert moved(Sums(2.0**24, 2.0), Sums(2.0**24, 2.0, 1.0)) <= 1.0
    rows = torch.tensor([[MANY], [1.0]])
    with_one, without = (DenseContributions(r).weighted_sum(torch.ones(len(r)))["value"]
                         for r in (rows, rows[:1]))  # fmt: skip
    assert float(with_one - without) == 1.0


class Inexact(DenseContributions):
    """Contributions whose sums err by as much as they may, this way or that."""

    error = 0.01

    def __init__(self, values, sign):
        super().__init__(values)
        self.sign = sign

    def sum_error(self, rows):
        return self.error

    def weighted_sum(self, w):
        exact = super().weighted_sum(w)["value"]
        return {"value": exact + self.sign * self.error / (1 + 2 * self.error) / 10}


@fails_on(46, broken.the_clip_leaves_no_room_for_sums)
def test_item_46_errors_of_the_sums_are_part_of_the_sensitivity():
    """The attack: a sum that is rounded up with the record, and down without it."""
    record = torch.full((2, 100), 10.0)
    record[1] = 0
    with_one, without = Inexact(record, 1), Inexact(torch.zeros(2, 100), -1)
    assert moved(with_one, without) <= 1.0


class Pair(nn.Module):
    """One layer used twice: its two gradients cancel but for a part of 4e-6."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return self.layer(x[:, :1]) - self.layer(x[:, 1:])


class Summed(nn.Module):
    """A layer at many positions, the outputs of which are added up."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).flatten(1).sum(1, keepdim=True)


def distance(model, x, y, x2, y2, clip, relation="zero-out", n=None):
    """Return the distance of neighbouring sums in units of the sensitivity."""
    nn.init.zeros_(next(model.parameters()))

    def release(data):
        gate = dpbnn.Gate(clip, 1.0, FullBatch(n or len(x)), dpbnn.Ledger(relation=relation))
        gate(attach(model, Normal(1.0))(*data))

    return dpbnn.replay(release, (x, y), (x2, y2), trace=False).worst


def uneven(half, share):
    """Return targets: records of one size, then pairs that float32 rounds up and down again."""
    ulp = half * 2.0**-23
    steps = round(share / ulp)
    y = torch.full((2 * half, 1), -share)
    y[half::2], y[half + 1 :: 2] = -(steps - 1 + 0.51) * ulp, (steps - 1 + 0.49) * ulp
    return y


@fails_on(46, broken.terms_are_added_in_float32)
def test_item_46_cancelling_uses_of_a_layer_leave_no_rounding():
    """The attack: records whose two gradients are 2^18 times as large as their difference."""
    half, large = 128, 2.0**18
    ulp = large * half * 2**-23
    a = torch.full((2 * half,), large)
    a[half::2], a[half + 1 :: 2] = large + 0.51 * ulp, -large - 0.49 * ulp
    x, y = torch.stack([a, a - 1], 1), torch.full((2 * half, 1), -1.0)
    y2 = y.clone()
    y2[0] = 0
    assert distance(Pair(), x, y, x, y2, 1.1) <= 1


LAYERS = {
    "embedding": (lambda: nn.Embedding(2, 1), torch.ones(512, 64, dtype=torch.long)),
    "linear": (lambda: nn.Linear(1, 1, bias=False), torch.ones(512, 64, 1)),
    "convolution": (lambda: nn.Conv1d(1, 1, 1, bias=False), torch.ones(512, 1, 64)),
}


@fails_on(46, broken.terms_are_added_in_float32, kind="embedding")
@fails_on(46, broken.terms_are_added_in_float32, kind="linear")
@fails_on(46, broken.terms_are_added_in_float32, kind="convolution")
@pytest.mark.parametrize("kind", LAYERS)
def test_item_46_positions_are_no_float32_additions(kind):
    """The attack: 64 positions round 64 times as often as the bound on the sum counts."""
    (layer, x), y = LAYERS[kind], uneven(256, 1 / 64)
    y2 = y.clone()
    y2[0] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outer, "form", "gram")  # as for large weights: not instantiated
        assert distance(Summed(layer()), x, y, x, y2, 1.02) <= 1


@fails_on(46, broken.add_remove_sums_are_float32)
def test_item_46_a_removed_row_changes_no_rounding_of_the_others():
    """The attack: one row less shifts all blocks, of many more records than n."""
    y = uneven(256, 1.0).repeat(100, 1)
    x = torch.ones(len(y), 1)
    layer = nn.Linear(1, 1, bias=False)
    assert distance(layer, x, y, x[1:], y[1:], 1.01, "add/remove", 512) <= 1


@fails_on(46, broken.clips_may_be_tiny)
def test_item_46_clip_factors_are_normal_numbers():
    """The attack: a factor of 7e-46 is rounded to 1.4e-45, and the contribution doubles."""
    x = torch.full((1, 1), 1.8e19**0.5)
    for clip in (1.3e-26, {"weight": 1.3e-26}):
        ledger = dpbnn.Ledger()
        with pytest.raises(ValueError, match=r"clip=1\.3e-26"):
            dpbnn.Gate(clip, 1.0, ledger=ledger)(
                attach(nn.Linear(1, 1, bias=False), Normal(1.0))(x, -x)
            )
        assert ledger.epsilon(1e-5) == 0
    nn.init.zeros_((layer := nn.Linear(1, 1, bias=False)).weight)
    assert distance(layer, x, -x, x, 0 * x, 1e-18) <= 1


def test_item_46_clips_of_any_size_have_a_norm():
    assert dpbnn.Gate({"a": 3e-200, "b": 4e-200}, 0.0).clip == pytest.approx(5e-200)
    assert dpbnn.Gate({"a": 3e200, "b": 4e200}, 1.0).clip == pytest.approx(5e200)


def test_item_46_strided_rows_have_norms_as_others():
    rows = torch.full((2, 16383), 2**-12 * 0.9995)
    rows[:, 0] = 1
    exact = rows.double().square().sum(1)
    assert (row_squares(rows.T.contiguous().T) * INFLATION**2 >= exact).all()


def test_item_46_reserved_noise_stays_private():
    gate = dpbnn.Gate(1.0, 1.0)
    gate.reserve(2)
    gate.noise = NoiseSource.seeded(0)
    with pytest.raises(ValueError, match="seeded"):
        gate(DenseContributions(torch.ones(1, 2)))


def test_item_45_grids_are_normal_numbers_of_what_is_released():
    with pytest.raises(ValueError, match="std"):
        NoiseSource().add({"x": torch.zeros(3)}, 2.0**-120, torch.float64)


@pytest.mark.parametrize("twin", twins_of(__name__), ids=str)
def test_the_same_test_fails_on_the_broken_version(twin, tmp_path):
    twin.must_fail(tmp_path)
