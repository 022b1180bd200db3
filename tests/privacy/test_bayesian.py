"""Bayesian privacy: costs against integrals, the estimator's coverage, the observer, the words."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.privacy.bayesian import LEVELS, BayesianAccountant
from dpbnn.privacy.bayesian_costs import (
    best_order,
    left_cost,
    pair_distances,
    smallest,
    step_cost,
    upper_mean,
)
from dpbnn.reproduce.bayesian_dp import right_cost

Q = 64 / 60_000


def curve(ratio, orders, rate=Q, steps=10_000):
    return [steps * left_cost(order, rate, ratio)[0] for order in orders]


class TestFigure3:
    """q = 64/60000, sigma = 1, 10 000 steps, delta 1e-5."""

    @pytest.mark.parametrize(
        ("distance", "value", "order"), [(0.1, 0.238, 49), (0.7, 0.543, 26), (1.0, 1.107, 12)]
    )
    def test_the_smallest_values_on_the_papers_grid(self, distance, value, order):
        orders = range(1, 50)
        found = best_order(curve(distance, orders), orders, 1e-5)
        assert found == (pytest.approx(value, abs=1e-3), order)

    def test_at_distance_a_tenth_the_value_still_falls_at_the_end_of_that_grid(self):
        assert best_order(curve(0.1, range(1, 513)), range(1, 513), 1e-5)[0] < 0.06

    @pytest.mark.parametrize(("distance", "value"), [(0.7, 5.16e4), (1.0, 1.78e5)])
    def test_a_wrong_order_is_ruinous(self, distance, value):
        assert curve(distance, [49])[0] / 49 == pytest.approx(value, rel=0.05)

    def test_the_accountant_finds_the_same(self):
        accountant = BayesianAccountant(40, orders=range(1, 50))
        for _ in range(40):
            accountant.add([0.7, 0.7], noise_std=1.0, rate=0.03)
        estimate = accountant.raw_estimate(1e-5, failure=0)
        orders = range(1, 50)
        expected = best_order(curve(0.7, orders, 0.03, 40), orders, 1e-5)
        assert (estimate.epsilon_mu, estimate.order) == (pytest.approx(expected[0]), expected[1])


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.01, 1.1, 500), (1.0, 12.0, 30)])
def test_at_a_constant_distance_it_is_the_moments_accountant(rate, sigma, steps):
    """dp-accounting's Renyi divergences with the old conversion, at integer orders."""
    import dp_accounting
    from dp_accounting import rdp

    orders = range(1, 129)
    ledger = rdp.RdpAccountant([order + 1 for order in orders])
    noise = dp_accounting.GaussianDpEvent(sigma)
    event = noise if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, noise)
    ledger.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    expected = min(d + math.log(1e5) / order for d, order in zip(ledger._rdp, orders, strict=True))
    accountant = BayesianAccountant(steps, orders=orders)
    for _ in range(steps):
        accountant.add(np.full(7, 2.5), noise_std=2.5 * sigma, rate=rate)
    assert accountant.raw_estimate(1e-5, failure=0).epsilon_mu == pytest.approx(expected, rel=1e-9)


def mixture_moment(order, rate, ratio, turned=False):
    """log E (p/p')^order by quadrature: p' = N(0,1), p = (1-q) N(0,1) + q N(r,1), or turned."""

    def log_integrand(w):
        base = -(w**2) / 2 - 0.5 * math.log(2 * math.pi)
        mixed = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio * w - ratio**2 / 2)
        return base + (-order if turned else order) * mixed

    grid = np.linspace(-40, 40 + order * ratio, 4001)
    top = log_integrand(grid).max()
    where = grid[log_integrand(grid).argmax()]
    value = integrate.quad(
        lambda w: math.exp(log_integrand(w) - top),
        where - 30,
        where + 30,
        points=[where, 0.0, ratio],
        limit=500,
    )[0]
    return top + math.log(value)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("order", [1, 4, 12])
class TestTheorem3:
    def test_the_cost_is_the_integral(self, rate, ratio, order):
        integral = mixture_moment(order + 1, rate, ratio)
        assert left_cost(order, rate, ratio)[0] == pytest.approx(integral, rel=1e-7, abs=1e-13)
        assert left_cost(order, rate, 1.01 * ratio)[0] > integral * (1 + 1e-3)

    def test_the_other_divergence_is_smaller_so_the_right_hand_cost_is_not_needed(
        self, rate, ratio, order
    ):
        turned = mixture_moment(order, rate, ratio, turned=True)
        assert turned <= left_cost(order, rate, ratio)[0] + 1e-12
        assert turned <= right_cost(order, rate, ratio)[0] + 1e-12


def test_costs_are_stable_at_both_ends():
    assert left_cost(512, 1e-6, 0.0)[0] == 0
    assert 0 < left_cost(1, 1e-6, 1e-4)[0] == pytest.approx(1e-12 * 1e-8, rel=1e-4)
    assert math.isfinite(left_cost(512, 0.5, 50.0)[0])


def test_hoelder_costs_lie_between_the_mean_and_the_largest():
    d = np.array([0.1, 0.2, 0.3, 0.9])
    worst, mean = left_cost(6, 0.05, 0.9)[0], left_cost(6, 0.05, d).mean()
    costs = [step_cost(6, d, 1.0, 0.05, steps) for steps in (1, 10, 1000, 10**6)]
    assert costs == sorted(costs)
    assert mean <= costs[0] <= costs[-1] <= worst
    assert costs[-1] == pytest.approx(worst, rel=1e-3)


class TestEstimator:
    """Theorem 4: coverage over 4000 repeats of 100 samples, at a nominal failure of 5 %.

    Distributions are given by their quantile functions, so that the truth is a sum. A binomial test
    at false-alarm rate 1e-4: at most 5 % + 3.72 sqrt(.05 .95 / 4000) = 6.3 % may be too low.
    """

    REPEATS, SAMPLES = 4000, 100
    ALLOWED = 0.05 + 3.72 * math.sqrt(0.05 * 0.95 / 4000)

    def too_low(self, quantile, power, failure=0.05, rate=0.05, order=4):
        def logs(u):
            d, where = np.unique(quantile(u), return_inverse=True)
            return power * left_cost(order, rate, d)[where]

        truth = upper_mean(logs((np.arange(200_000) + 0.5) / 200_000), 0.0)[0]
        u = np.random.default_rng(0).uniform(size=self.REPEATS * self.SAMPLES)
        starts = np.arange(0, len(u), self.SAMPLES)
        return np.mean(upper_mean(logs(u), failure, starts=starts) < truth)

    @pytest.mark.parametrize("power", [10, 100])
    @pytest.mark.parametrize("clipped", [0.5, 0.7])
    def test_it_covers_norms_of_which_many_are_at_the_clip(self, clipped, power):
        def norms(u):
            return np.minimum(1.0, u / (1 - clipped))

        assert self.too_low(norms, power) <= self.ALLOWED
        assert self.too_low(norms, power, failure=0.3) > self.ALLOWED

    def test_it_covers_a_distribution_that_leans_to_the_clip(self):
        assert self.too_low(lambda u: u ** (1 / 20), power=10) <= self.ALLOWED

    def test_it_covers_less_than_it_says_where_the_samples_are_skewed(self):
        """Uniform distances: 7 % instead of 5 % at a power of 10, 15 % at 100."""
        assert 0.06 < self.too_low(lambda u: u, power=10) < 0.09
        assert 0.12 < self.too_low(lambda u: u, power=100) < 0.18

    def test_it_fails_where_tails_are_heavy(self):
        """Weibull(0.5), the paper's own choice of gradients: almost every estimate is too low."""
        assert self.too_low(lambda u: 0.05 * np.log(1 / (1 - u)) ** 2, power=1) > 0.95

    def test_it_equals_students_formula(self):
        values = np.random.default_rng(1).gamma(3, size=30)
        half = stats.t.isf(0.01, 29) * values.std() / math.sqrt(29)
        assert upper_mean(np.log(values), 0.01)[0] == pytest.approx(math.log(values.mean() + half))

    def test_counts_and_several_samples_are_the_same_as_one_by_one(self):
        a, b = np.array([1.0, 1.0, 5.0]), np.array([700.0, 701.0, 701.0, 701.0])
        whole = upper_mean([1.0, 5.0, 700.0, 701.0], 0.1, [2, 1, 1, 3], [0, 2])
        assert whole == pytest.approx([upper_mean(a, 0.1)[0], upper_mean(b, 0.1)[0]])

    def test_equal_samples_need_no_allowance(self):
        assert upper_mean(np.full(5, 3.0), 1e-12)[0] == pytest.approx(3.0)


class TestSearch:
    def test_it_finds_the_smallest_value_of_any_quasiconvex_function(self):
        for size in (1, 2, 3, 7, 64, 512):
            for best in range(1, size + 1):
                found = smallest(lambda o, best=best: abs(o - best) + 0.5, range(1, size + 1))
                assert found == (0.5, best)

    def test_every_order_of_a_short_list_is_looked_at(self):
        assert smallest(lambda o: 1 / o, [2, 4, 8, 16, 32]) == (1 / 32, 32)


class TestDistances:
    def values(self):
        return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def test_pairs_of_records_from_inner_products(self):
        v = self.values().double()
        i, j = np.triu_indices(6, 1)
        expected = (v[i] - v[j]).norm(dim=1)
        found = pair_distances(DenseContributions(self.values()).gram())
        assert found == pytest.approx(expected.numpy(), rel=1e-6)

    def test_clipped_first(self):
        v = self.values().double()
        v = v * (0.5 / v.norm(dim=1, keepdim=True)).clamp(max=1)
        i, j = np.triu_indices(6, 1)
        expected = (v[i] - v[j]).norm(dim=1)
        found = pair_distances(DenseContributions(self.values()).gram(), clip=0.5)
        assert found == pytest.approx(expected.numpy(), rel=1e-6)
        assert (found <= 1.0 + 1e-12).all()

    def test_pairs_of_batches(self):
        v = self.values().double()
        halves = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]) / 3
        expected = (v[:3].mean(0) - v[3:].mean(0)).norm()
        found = pair_distances(DenseContributions(self.values()).gram(), batches=halves)
        assert found == pytest.approx([float(expected)], rel=1e-6)

    def test_of_a_network_without_a_second_backward_pass(self):
        model = torch.nn.Linear(3, 2)
        c = dpbnn.contributions(model, "categorical", torch.randn(5, 3), torch.arange(5) % 2)
        assert pair_distances(c.gram()).shape == (10,)

    def test_bad_matrices_are_refused(self):
        with pytest.raises(ValueError, match="square matrix"):
            pair_distances(np.zeros((2, 3)))
        with pytest.raises(ValueError, match="finite"):
            pair_distances(np.full((2, 2), np.nan))


class TestBadInput:
    def test_steps_not_fixed_in_advance(self):
        with pytest.raises(ValueError, match=r"BayesianAccountant\(steps=T\)"):
            BayesianAccountant().add([1.0, 2.0], noise_std=1.0, rate=0.1)
        with pytest.raises(ValueError, match="steps=0"):
            BayesianAccountant(0)

    def test_more_steps_than_were_fixed(self):
        accountant = BayesianAccountant(1)
        accountant.add([1.0, 2.0], noise_std=1.0, rate=0.1)
        with pytest.raises(ValueError, match="fixed in advance"):
            accountant.add([1.0, 2.0], noise_std=1.0, rate=0.1)

    @pytest.mark.parametrize("orders", [[], [0, 1], [1.5]])
    def test_orders(self, orders):
        with pytest.raises(ValueError, match="whole numbers >= 1, at least one"):
            BayesianAccountant(5, orders=orders)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    def test_distances_that_are_none(self, bad):
        with pytest.raises(ValueError, match="finite and >= 0"):
            BayesianAccountant(5).add([1.0, bad], noise_std=1.0, rate=0.1)

    def test_fewer_than_two_samples(self):
        with pytest.raises(ValueError, match="at least 2"):
            BayesianAccountant(5).add([1.0], noise_std=1.0, rate=0.1)

    @pytest.mark.parametrize("wrong", [{"noise_std": 0.0}, {"rate": 0.0}, {"rate": 1.5}])
    def test_noise_and_rate(self, wrong):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            BayesianAccountant(5).add([1.0, 2.0], **{"noise_std": 1.0, "rate": 0.1, **wrong})

    def test_delta_and_failure_and_nothing_seen(self):
        accountant = BayesianAccountant(5)
        with pytest.raises(ValueError, match="no steps were observed"):
            accountant.raw_estimate(1e-5)
        accountant.add([1.0, 2.0], noise_std=1.0, rate=0.1)
        with pytest.raises(ValueError, match="delta=None"):
            accountant.raw_estimate()
        with pytest.raises(ValueError, match="below delta"):
            accountant.raw_estimate(1e-5, failure=1e-5)


N, STEPS = 60, 25


def dataset():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def run(observers, **change):
    settings = {"noise_multiplier": 2.0, "delta": 1e-5, "n": N, "batch_size": 12, "steps": STEPS}
    plan = dpbnn.plan(**{**settings, **change.pop("plan", {})})
    method = change.pop("method", dpbnn.SGD(learning_rate=0.5, clip=0.7))
    model = change.pop("model", lambda: dpbnn.mlp(4, (5,), 3))
    options = {"method": method, "plan": plan, "observers": observers, **change}
    return dpbnn.fit(model, dataset(), **options)


class TestObserver:
    @pytest.mark.parametrize(
        "method",
        [
            dpbnn.SGLD(learning_rate=1e-3, keep=3),
            dpbnn.BBP(learning_rate=0.1),
            dpbnn.VI(learning_rate=0.1),
            dpbnn.MCDropout(learning_rate=0.1),
        ],
        ids=lambda m: m.name,
    )
    def test_it_goes_with_every_method(self, method):
        accountant = BayesianAccountant()
        model = lambda: dpbnn.mlp(4, (5,), 3, dropout=0.1)  # noqa: E731
        posterior = run([accountant], method=method, model=model)
        estimate = accountant.raw_estimate()
        assert (estimate.steps, estimate.observed) == (STEPS, STEPS)
        assert estimate.dp is posterior.privacy
        assert estimate.epsilon_mu > 0

    @pytest.mark.parametrize("sampling", ["poisson", "full-batch"])
    def test_it_is_never_above_the_moments_accountant(self, sampling):
        accountant = BayesianAccountant()
        size = {"batch_size": 12} if sampling == "poisson" else {"batch_size": None}
        run([accountant], plan={"sampling": sampling, "noise_multiplier": 4.0, **size})
        rate = 0.2 if sampling == "poisson" else 1.0
        orders = range(1, 513)
        worst = best_order(curve(1 / 4.0, orders, rate, STEPS), orders, 0.9e-5)[0]
        assert accountant.raw_estimate().epsilon_mu <= worst * (1 + 1e-9)

    def test_with_a_tiny_clip_every_norm_is_the_clip_and_it_equals_the_moments_accountant(self):
        accountant = BayesianAccountant()
        run([accountant], method=dpbnn.SGD(learning_rate=0.5, clip=1e-4))
        orders = range(1, 513)
        expected = best_order(curve(1 / 2.0, orders, 0.2, STEPS), orders, 1e-5)
        estimate = accountant.raw_estimate(failure=0)
        assert (estimate.epsilon_mu, estimate.order) == (pytest.approx(expected[0]), expected[1])

    def test_what_it_sees_are_the_clipped_norms_rounded_up_a_little(self):
        values = torch.tensor([[3.0, 4.0], [0.03, 0.04], [0.0, 0.0], [math.nan, 1.0]])
        accountant = BayesianAccountant(10)
        gate = dpbnn.Gate(2.0, 1.5, dpbnn.Poisson(10, 4), watchers=[accountant.watch])
        gate(DenseContributions(values))
        accountant._unload()
        sample = accountant._samples[0]
        ratios = np.repeat(sample.values, sample.counts) * 3.0
        truth = np.array([0.0, 0.0, 0.05, 2.0])
        assert (ratios >= truth).all()
        assert ratios == pytest.approx(truth, abs=2 * 2.0 / LEVELS * math.sqrt(0.05 / 2) + 1e-5)
        assert sample.rate == 0.4

    def test_groups_of_clips_give_the_joint_norm(self):
        seen = []
        clips = {"a": 1.0, "b": 2.0}
        gate = dpbnn.Gate(clips, 1.0, watchers=[lambda event, clip, norms: seen.append(norms)])
        gate(DenseContributions({"a": torch.full((1, 1), 9.0), "b": torch.full((1, 1), 0.5)}))
        assert float(seen[0]) == pytest.approx(math.sqrt(1 + 0.25), rel=1e-3)

    def test_chunks_and_empty_batches(self):
        accountant = BayesianAccountant()
        run([accountant], microbatch_size=3, plan={"batch_size": 2})
        estimate = accountant.raw_estimate()
        assert estimate.observed == STEPS
        assert estimate.charged > 0  # of 25 Poisson batches of two records, some have fewer
        assert estimate.fewest >= 2

    def test_a_watcher_comes_after_the_release_and_cannot_reach_it(self):
        def vandal(event, clip, norms):
            norms.fill_(math.nan)

        values, source = torch.randn(8, 3), dpbnn.NoiseSource.seeded
        plain = dpbnn.Gate(1.0, 1.0, noise=source(1))(DenseContributions(values))["value"]
        gate = dpbnn.Gate(1.0, 1.0, noise=source(1), watchers=[vandal])
        assert torch.equal(gate(DenseContributions(values))["value"], plain)

    def test_the_run_is_bit_for_bit_the_same_with_and_without(self):
        plain = run([], debug_seed=3)
        watched = run([BayesianAccountant()], debug_seed=3)
        for name, value in plain.model.state_dict().items():
            assert torch.equal(value, watched.model.state_dict()[name])

    def test_neighbours_replay_with_an_observer(self):
        def train(data):
            plan = dpbnn.plan(noise_multiplier=2.0, delta=1e-5, n=N, batch_size=12, steps=3)
            method = dpbnn.SGD(learning_rate=0.5, clip=0.7)
            observers = [BayesianAccountant()]
            model = lambda: dpbnn.mlp(4, (5,), 3)  # noqa: E731
            fitted = dpbnn.fit(model, data, method=method, plan=plan, observers=observers)
            return fitted.model.state_dict()

        replay = dpbnn.replay(train, dataset(), 7)
        assert replay.worst <= 1 + 1e-5
        assert [d for d in replay.differences if "record 7" not in d] == []

    def test_after_a_resume_what_was_not_seen_counts_at_the_clip(self, tmp_path, monkeypatch):
        from dpbnn.methods.sgd import SGDProcess

        update, seen = SGDProcess.update, []

        def interrupted(self, state, release):
            state = update(self, state, release)
            seen.append(1)
            if len(seen) == 10:
                raise KeyboardInterrupt
            return state

        with monkeypatch.context() as patch:
            patch.setattr(SGDProcess, "update", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run([BayesianAccountant()], out=tmp_path, checkpoint_every=5)
        accountant = BayesianAccountant()
        run([accountant], out=tmp_path, checkpoint_every=5, resume=True)
        estimate = accountant.raw_estimate()
        assert estimate.charged >= 5
        assert estimate.observed + 5 == STEPS

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sampling": "partition"}, "partition sampling"),
            ({"sampling": "full-batch", "batch_size": None, "relation": "replace-one"}, "replace"),
        ],
    )
    def test_what_has_no_analysis_is_refused_before_anything_is_spent(self, change, message):
        ledger = dpbnn.Ledger(relation=change.get("relation", "zero-out"))
        with pytest.raises(ValueError, match=message):
            run([BayesianAccountant()], plan=change, ledger=ledger)
        assert ledger.releases == 0

    def test_an_open_plan_another_length_and_a_used_accountant_are_refused(self):
        accountant = BayesianAccountant()
        open_plan = dpbnn.open_plan(n=N, batch_size=12, steps=3)
        method = dpbnn.SGD()
        with pytest.raises(ValueError, match="plan is open"):
            dpbnn.fit(
                lambda: dpbnn.mlp(4, (5,), 3),
                dataset(),
                method=method,
                plan=open_plan,
                observers=[accountant],
            )
        with pytest.raises(ValueError, match="made for steps=7"):
            run([BayesianAccountant(7)])
        run([accountant])
        with pytest.raises(ValueError, match="make a new one"):
            run([accountant])

    def test_the_earlier_name_of_the_argument_warns_and_works(self):
        accountant = BayesianAccountant()
        with pytest.warns(DeprecationWarning, match="accountants= of fit is called observers="):
            run([], accountants=[accountant])
        assert accountant.raw_estimate().observed == STEPS
        with pytest.raises(ValueError, match="two names of one argument"):
            run([BayesianAccountant()], accountants=[BayesianAccountant()])

    def test_other_mechanisms_of_the_plan_count_too(self):
        alone, beside = BayesianAccountant(), BayesianAccountant()
        run([alone], debug_seed=1)
        run([beside], debug_seed=1, plan={"beside": [dpbnn.Event("full-batch", 3.0, 2)]})
        assert beside.raw_estimate().charged == alone.raw_estimate().charged + 2
        assert beside.raw_estimate().epsilon_mu > alone.raw_estimate().epsilon_mu


class TestWords:
    @pytest.fixture
    def estimate(self):
        accountant = BayesianAccountant()
        run([accountant])
        return accountant.raw_estimate()

    def test_there_is_no_epsilon_to_read_or_to_print(self, estimate):
        assert not hasattr(estimate, "epsilon")
        with pytest.raises(AttributeError, match="not differential privacy"):
            _ = estimate.epsilon
        with pytest.raises(TypeError, match="not differential privacy"):
            float(estimate)
        with pytest.raises(TypeError, match="not differential privacy"):
            f"{estimate:.3f}"
        with pytest.raises(TypeError):
            _ = estimate < 1.0
        assert f"{estimate}" == str(estimate)

    def test_it_is_no_privacy_statement_and_does_not_become_one(self, estimate):
        assert not isinstance(estimate, dpbnn.PrivacyStatement)
        assert "epsilon" not in estimate.to_dict()
        with pytest.raises(ValueError, match="schema"):
            dpbnn.PrivacyStatement.from_dict(estimate.to_dict())
        assert json.loads(estimate.to_json())["kind"] == "bayesian-privacy-estimate"

    def test_the_text_says_what_it_is(self, estimate):
        text = " ".join(str(estimate).split())
        for words in (
            "Bayesian privacy ESTIMATE, not differential privacy",
            "drawn from the same distribution as the data",
            "computed from the data without noise",
            "It is no bound",
            "failure probability 1e-06",
            f"{estimate.samples} distances at 25 of 25 steps",
            f"{estimate.floor:.4g} = -log(delta) / 512",
            "DP beside: Differential privacy: epsilon =",
        ):
            assert words in text
        assert "epsilon =" not in text.split("DP beside")[0]

    def test_it_says_when_it_sits_on_the_cap(self):
        accountant = BayesianAccountant(100, orders=[2, 4, 8, 16, 32])
        for _ in range(100):
            accountant.add(np.full(28, 0.01), noise_std=0.1, rate=0.017)
        estimate = accountant.raw_estimate(1e-10)
        assert estimate.at_cap
        assert "it says more of the cap than of the data" in str(estimate)
        assert estimate.floor == pytest.approx(-math.log(0.9e-10) / 32)
        assert estimate.epsilon_mu == pytest.approx(estimate.floor, rel=0.01)

    def test_nothing_of_it_is_in_the_posterior_or_in_the_repr(self, tmp_path):
        accountant = BayesianAccountant()
        posterior = run([accountant])
        posterior.save(tmp_path / "saved")
        text = "".join(p.read_text(errors="ignore") for p in (tmp_path / "saved").iterdir())
        raw = str(accountant.raw_estimate().epsilon_mu)
        for place in (text, posterior.privacy.to_json(), str(posterior.settings)):
            assert raw not in place
            assert "epsilon_mu" not in place
        assert repr(accountant) == "BayesianAccountant(steps=25), 25 steps observed"

    def test_it_is_frozen(self, estimate):
        with pytest.raises(dataclasses.FrozenInstanceError):
            estimate.epsilon_mu = 0.0


def test_attack_probability_of_both_kinds():
    """P_A of the paper's table, as recalled: 0.898 at 2.2, 0.721 at 0.95, 0.550 at 0.2."""
    assert dpbnn.attack_probability(2.2) == pytest.approx(0.9, abs=1e-3)
    assert dpbnn.attack_probability(0.95) == pytest.approx(0.721, abs=1e-3)
    assert dpbnn.attack_probability(0.2) == pytest.approx(0.550, abs=1e-3)
    assert dpbnn.attack_probability(0.0) == 0.5
    assert dpbnn.attack_probability(1e6) == 1.0
