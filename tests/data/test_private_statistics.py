"""Private statistics: the release is the stated one, and what follows from it is accurate."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

import dpbnn
from dpbnn.data import (
    Histograms,
    private_bounds,
    private_counts,
    private_quantiles,
    share,
    signed_log_grid,
    statistics,
)
from dpbnn.data.histograms import _margins
from dpbnn.privacy.events import Event

FALSE_ALARM = 1e-4


def silent(x, grid):
    """The exact counts: what the gate releases without noise."""
    return private_counts(x, grid, noise_multiplier=0.0).counts


def test_counts_are_those_of_numpy_and_ends_take_in_the_rest():
    x = np.random.default_rng(0).normal(size=(20_000, 3)) * [1, 5, 20]
    edges = np.linspace(-10, 10, 21)
    for column, counts in zip(x.T, silent(x, edges), strict=True):
        expected, _ = np.histogram(np.clip(column, -9.99, 9.99), edges)
        np.testing.assert_array_equal(counts, expected)


def test_every_column_can_have_its_own_grid():
    x = np.array([[0.5, 50.0], [1.5, 150.0]])
    grid = [[0, 1, 2], [0, 100, 200]]
    np.testing.assert_array_equal(silent(x, grid), [[1, 1], [1, 1]])


def test_values_that_are_not_finite_count_nowhere():
    x = np.array([[0.5, np.nan], [np.inf, 0.5], [-np.inf, np.nan]])
    np.testing.assert_array_equal(silent(x, [0, 1, 2]), [[1, 0], [1, 0]])


def test_a_mapped_array_is_counted_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "_ROWS", 100)
    x = np.random.default_rng(1).uniform(size=(1234, 2)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_array_equal(silent(mapped, np.linspace(0, 1, 5)).sum(1), [1234, 1234])
    np.testing.assert_array_equal(
        silent(mapped, np.linspace(0, 1, 5)), silent(torch.from_numpy(x), np.linspace(0, 1, 5))
    )


@pytest.mark.parametrize("columns", [1, 3])
def test_noise_has_std_sigma_times_clip_and_the_test_sees_five_percent(columns):
    """KS at sigma sqrt(p) over 60 000 counts, false-alarm rate 1e-4; it rejects 1.05 times that."""
    x = np.random.default_rng(2).uniform(size=(500, columns))
    grid = np.linspace(0, 1, 60_000 // columns + 1)
    histograms = private_counts(x, grid, noise_multiplier=2.0)
    noise = (histograms.counts - silent(x, grid)).ravel()
    std = 2.0 * math.sqrt(columns)
    assert histograms.noise_std == pytest.approx(std)
    assert stats.kstest(noise, "norm", (0, std)).pvalue > FALSE_ALARM
    assert stats.kstest(noise, "norm", (0, 1.05 * std)).pvalue < FALSE_ALARM


def test_neighbours_are_within_the_sensitivity_and_nothing_else_moves():
    x = np.random.default_rng(3).normal(size=(300, 4))
    neighbour = x.copy()
    neighbour[7] = np.nan

    def release(values):
        bounds = private_bounds(values, noise_multiplier=0.5, range=(-4, 4), cells=8)
        return np.array(bounds)

    result = dpbnn.replay(release, x, neighbour).check()
    assert result.worst == pytest.approx(1.0)
    masked = dpbnn.replay(release, x, 7).check()
    assert masked.worst == pytest.approx(1.0)


def test_the_replay_sees_a_count_too_many(monkeypatch):
    """A clip below sqrt(p) that is not applied is found by the same replay."""

    class Wrong(statistics._Cells):
        def norms(self):
            return torch.zeros(self.batch_size, dtype=torch.float64)

        def weighted_sum(self, w):
            return {name: 1.1 * value for name, value in super().weighted_sum(w).items()}

        def chunks(self):
            yield self

    monkeypatch.setattr(statistics, "_Cells", Wrong)
    x = np.zeros((20, 3))
    neighbour = x.copy()
    neighbour[0] = np.nan
    replayed = dpbnn.replay(
        lambda v: private_counts(v, [0, 1, 2], noise_multiplier=1.0).counts, x, neighbour
    )
    assert replayed.worst > 1.05


def test_the_ledger_is_charged_before_the_data_is_touched(monkeypatch):
    ledger = dpbnn.Ledger()

    class Unreadable(statistics._Cells):
        def chunks(self):
            raise RuntimeError(f"{ledger.releases} release recorded")

    monkeypatch.setattr(statistics, "_Cells", Unreadable)
    with pytest.raises(RuntimeError, match="1 release recorded"):
        private_counts(np.zeros((5, 2)), [0, 1, 2], noise_multiplier=1.0, ledger=ledger)


def test_a_budget_that_is_spent_refuses_and_reads_nothing(monkeypatch):
    ledger = dpbnn.Ledger(epsilon=0.1, delta=1e-5)
    monkeypatch.setattr(statistics._Cells, "chunks", None)
    with pytest.raises(dpbnn.BudgetExceeded):
        private_counts(np.zeros((5, 2)), [0, 1, 2], noise_multiplier=1.0, ledger=ledger)


def test_statistics_and_training_together_cost_the_budget():
    first, second = share(0.2, epsilon=1.0, delta=1e-5, n=2000, batch_size=100, epochs=3)
    assert first.epsilon == pytest.approx(0.2, rel=5e-3)
    assert 0.99 < second.epsilon <= 1.0
    ledger = dpbnn.Ledger(epsilon=1.0, delta=1e-5)
    x = np.random.default_rng(4).normal(size=(2000, 2)).astype(np.float32)
    histograms = private_counts(x, plan=first, ledger=ledger)
    assert ledger.events == first.own_events == (histograms.event,)
    y = torch.from_numpy((x[:, 0] > 0).astype(np.int64))
    posterior = dpbnn.fit(
        lambda: dpbnn.mlp(2, (4,), 2),
        (x, y),
        method=dpbnn.SGD(learning_rate=0.1, clip=1.0),
        plan=second,
        ledger=ledger,
    )
    assert ledger.epsilon() == pytest.approx(second.epsilon, rel=1e-6)
    assert posterior.privacy.epsilon <= 1.0
    with pytest.raises(dpbnn.BudgetExceeded):
        private_counts(x, plan=first, ledger=ledger)


def test_a_share_is_one_of_a_stated_budget():
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        share(1.5, epsilon=1.0, delta=1e-5, n=100, batch_size=10, epochs=1)
    with pytest.raises(ValueError, match="epsilon: missing"):
        share(0.1, delta=1e-5, n=100, batch_size=10, epochs=1)


N = 20_000
TRUTH = np.random.default_rng(5)
COLUMNS = {
    "normal": TRUTH.normal(50, 10, N),
    "skewed": TRUTH.exponential(1e5, N),
    "small": TRUTH.uniform(0, 1, N),
    "negative": -TRUTH.uniform(100, 300, N),
    "constant": np.full(N, 7.0),
    "zero": np.zeros(N),
    "binary": TRUTH.integers(0, 2, N).astype(float),
}


@pytest.fixture(scope="module")
def histograms():
    """All columns at epsilon 0.1, in one release on the default grid."""
    first, _ = share(0.1, epsilon=1.0, delta=1e-5, n=N, batch_size=200, epochs=1)
    return private_counts(np.stack(list(COLUMNS.values()), 1), plan=first)


def test_bounds_hold_nearly_all_values_and_are_not_far_out(histograms):
    """What lies outside could not be told from noise: less than the margin for eight cells.

    Four times the noise is added to that, for a false-alarm rate below 1e-3. Cells of the default
    grid are a factor of 1.78 wide; noise puts a bound further out than the cell of the outermost
    value with probability 1e-3 in a column.
    """
    lows, highs = histograms.bounds(tail=0.005, beta=1e-3)
    margin = _margins(histograms.counts.shape[1], 1e-3)[3, -1] * histograms.noise_std
    most = 0.005 + (margin + 4 * histograms.noise_std * math.sqrt(8)) / N
    assert most < 0.12
    for (name, values), low, high in zip(COLUMNS.items(), lows, highs, strict=True):
        assert low < high
        assert (values < low).mean() < most, name
        assert (values > high).mean() < most, name
        assert max(abs(low), abs(high)) <= max(1.78 * np.abs(values).max(), 1e-3), name
    assert lows[0] > 5
    assert lows[1] > 0
    assert highs[3] < 0


FAMILIES = {
    "normal": lambda r, n: r.normal(50, 10, n),
    "around zero": lambda r, n: r.normal(0, 1, n),
    "uniform": lambda r, n: r.random(n),
    "age": lambda r, n: np.clip(r.normal(40, 14, n), 17, 90),
    "binary": lambda r, n: (r.random(n) < 0.3) * 1.0,
    "missing": lambda r, n: np.where(r.random(n) < 0.3, np.nan, r.normal(120, 20, n)),
    "digits": lambda r, n: r.integers(0, 10, n) * 1.0,
    "negative": lambda r, n: -r.exponential(300, n),
    "skewed": lambda r, n: np.exp(r.normal(8, 1.2, n)),
    "heavy tails": lambda r, n: r.standard_t(2, n) * 10 + 100,
}


def test_bounds_are_usable_at_three_thousand_records():
    """Ten columns at epsilon 0.1 (sigma 30.8), drawn 40 times with fixed seeds.

    Bounds are called usable where they hold nine in ten values, and are at most 20 times as wide as
    the middle 98 % of the values.
    """
    n, sigma, repeats = 3000, 30.8, 40
    grid = signed_log_grid()
    usable = {}
    for name, family in FAMILIES.items():
        counts, values = [], []
        for seed in range(repeats):
            generator = np.random.default_rng(seed)
            values.append(family(generator, n))
            exact = silent(values[-1][:, None], grid)[0]
            counts.append(exact + generator.normal(0, sigma * math.sqrt(10), len(exact)))
        edges = np.broadcast_to(grid, (repeats, len(grid)))
        event = Event("full-batch", sigma)
        released = Histograms(edges, np.array(counts), sigma * math.sqrt(10), n, event)
        good = []
        for x, low, high in zip(values, *released.bounds(), strict=True):
            middle = np.nanquantile(x, [0.01, 0.99])
            inside = ((x >= low) & (x <= high)).sum() / np.isfinite(x).sum()
            good.append(inside > 0.9 and high - low < 20 * (middle[1] - middle[0]))
        usable[name] = np.mean(good)
    assert min(usable.values()) > 0.5, usable
    assert np.mean([*usable.values()]) > 0.85, usable


def test_noise_alone_rarely_widens_a_bound():
    """beta = 0.2: with 400 columns that have one cell filled, at most 110 are wider (5 std)."""
    columns, cells = 400, 50
    counts = np.zeros((columns, cells))
    counts[:, 25] = 1e6
    noisy = counts + np.random.default_rng(6).normal(size=counts.shape) * 100
    edges = np.broadcast_to(np.arange(cells + 1.0), (columns, cells + 1))
    released = Histograms(edges, noisy, 100.0, 10**6, Event("full-batch", 1.0))
    low, high = released.bounds(tail=0.0, beta=0.2)
    assert ((low < 25) | (high > 26)).sum() <= 0.2 * columns + 5 * math.sqrt(0.16 * columns)
    careless = Histograms(edges, noisy, 10.0, 10**6, Event("full-batch", 1.0))
    low, high = careless.bounds(tail=0.0, beta=0.2)
    assert ((low < 25) | (high > 26)).sum() > 300


def test_quantiles_mean_and_std_are_close(histograms):
    """On 128 even cells at epsilon 0.5: within 2 % of the range, five times the noise or more."""
    x = np.stack([COLUMNS["normal"], COLUMNS["small"] * 100], 1)
    plan = dpbnn.plan(epsilon=0.5, delta=1e-5, n=N, sampling="full-batch", steps=1)
    released = private_counts(x, np.linspace(0, 100, 129), plan=plan)
    levels = [0.1, 0.5, 0.9]
    np.testing.assert_allclose(released.quantiles(levels), np.quantile(x, levels, axis=0), atol=2)
    np.testing.assert_allclose(released.mean(), x.mean(0), atol=2)
    np.testing.assert_allclose(released.std(), x.std(0), atol=2)
    direct = private_quantiles(x, levels, np.linspace(0, 100, 129), plan=plan)
    np.testing.assert_allclose(direct, np.quantile(x, levels, axis=0), atol=2)
    assert histograms.mean()[0] == pytest.approx(50, abs=10)


def test_quantiles_without_noise_are_exact_on_the_grid():
    x = np.repeat(np.arange(10) + 0.5, 100)[:, None]
    found = private_quantiles(x, [0.0, 0.1, 0.5, 1.0], np.arange(11.0), noise_multiplier=0.0)
    np.testing.assert_allclose(found[:, 0], [0, 1, 5, 10], atol=1e-6)


def test_quantiles_rise_whatever_the_noise():
    released = private_counts(np.zeros((10, 3)), noise_multiplier=1e4)
    found = released.quantiles(np.linspace(0, 1, 50))
    assert np.isfinite(found).all()
    assert (np.diff(found, axis=0) >= 0).all()
    mass = released.mass()
    assert (mass >= 0).all()
    assert (mass.sum(1) <= 10 * (1 + 1e-9)).all()
    assert np.isfinite(released.mean()).all()
    assert np.isfinite(released.std()).all()


def test_columns_without_values_have_the_outermost_edges():
    x = np.full((5000, 1), np.nan)
    released = private_counts(x, np.linspace(-3, 3, 7), noise_multiplier=1.0)
    low, high = released.bounds()
    assert (low[0], high[0]) == (-3, 3)


def test_a_table_too_small_for_the_noise_is_refused_before_spending():
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=r"n=50: too few records .* public bounds"):
        private_bounds(np.zeros((50, 3)), noise_multiplier=30.0, ledger=ledger)
    assert ledger.releases == 0


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (np.zeros(3), {"noise_multiplier": 1.0}, "shape"),
        (np.zeros((0, 3)), {"noise_multiplier": 1.0}, "shape"),
        (np.array([["a"]]), {"noise_multiplier": 1.0}, "type"),
        (np.zeros((3, 2)), {}, "give one of the two"),
        (np.zeros((3, 2)), {"noise_multiplier": 1.0, "grid": [1, 0]}, "rising"),
        (np.zeros((3, 2)), {"noise_multiplier": 1.0, "grid": [0, math.inf]}, "finite"),
        (np.zeros((3, 2)), {"noise_multiplier": 1.0, "grid": np.zeros((3, 4))}, "one per column"),
    ],
)
def test_wrong_inputs_are_refused_before_spending(x, arguments, message):
    ledger = dpbnn.Ledger()
    with pytest.raises(ValueError, match=message):
        private_counts(x, ledger=ledger, **arguments)
    assert ledger.releases == 0


def test_a_plan_of_another_kind_is_refused():
    training = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=100, batch_size=10, steps=5)
    with pytest.raises(ValueError, match="full-batch"):
        private_counts(np.zeros((100, 2)), plan=training)
    other = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=99, sampling="full-batch", steps=1)
    with pytest.raises(ValueError, match="n=99"):
        private_counts(np.zeros((100, 2)), plan=other)


def test_levels_and_ranges_are_checked_before_spending():
    x, ledger = np.zeros((10, 1)), dpbnn.Ledger()
    settings = {"noise_multiplier": 0.1, "ledger": ledger}
    with pytest.raises(ValueError, match="q="):
        private_quantiles(x, [1.5], **settings)
    with pytest.raises(ValueError, match="tail"):
        private_bounds(x, tail=0.7, **settings)
    with pytest.raises(ValueError, match="beta"):
        private_bounds(x, beta=0.0, **settings)
    with pytest.raises(ValueError, match="range"):
        private_bounds(x, range=(1, 0), **settings)
    with pytest.raises(ValueError, match="largest"):
        signed_log_grid(1.0, 0.1)
    assert ledger.releases == 0


def test_the_relation_is_that_of_the_plan():
    x = np.zeros((100, 2))
    plan = dpbnn.plan(
        epsilon=1.0, delta=1e-5, n=100, sampling="full-batch", steps=1, relation="replace-one"
    )
    private_counts(x, plan=plan)
    with pytest.raises(ValueError, match="replace-one and the ledger zero-out"):
        private_counts(x, plan=plan, ledger=dpbnn.Ledger())


def test_the_grid_covers_both_signs_evenly():
    grid = signed_log_grid()
    np.testing.assert_allclose(grid, -grid[::-1])
    assert grid[-1] == pytest.approx(1e9)
    assert (np.diff(grid) > 0).all()
