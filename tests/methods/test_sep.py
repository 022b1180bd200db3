"""DP-SEP: the private path against exact answers, its noise, and neighbours."""

import dataclasses
import math
import secrets

import numpy as np
import pytest
import torch
from held_data import assert_holds_no_data
from interruption import stopped_after
from scipy import stats
from stepping import step
from torch import nn

import dpbnn
from dpbnn.contributions import DenseContributions
from dpbnn.likelihoods import Gaussian as GaussianNoise
from dpbnn.methods.method import Problem
from dpbnn.methods.sep import SEPProcess
from dpbnn.methods.state import flat

N, NOISE = 40, 0.5
EXACT = {"average": None, "trust": None, "floor": 1e-6}


def data(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1).sin() + 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y


def net(hidden=(5,), inputs=3):
    torch.manual_seed(1)
    return dpbnn.mlp(inputs, hidden, 1).double()


def problem(model=None, n=N, batch_size=None, steps=10, noise=NOISE, private=True):
    return Problem(
        net() if model is None else model,
        GaussianNoise(noise),
        dpbnn.Gaussian(1.0),
        n,
        n if batch_size is None else batch_size,
        steps,
        private,
    )


def open_step(process, state, x, y):
    """One step on the private path, without clip and noise."""
    return step(process, state, dpbnn.Gate(math.inf, 0.0), x, y)


SETTINGS = {
    "default": dpbnn.SEP(),
    "raw": dpbnn.SEP(coordinates="raw", step_size=0.01),
    "momentum": dpbnn.SEP(momentum=0.8, weight=3.0, trust=0.3),
    "blocks": dpbnn.SEP(blocks=2, clip=0.1),
    "heat": dpbnn.SEP(heat=10.0, average=0.2, start_variance=0.1),
    "no limits": dpbnn.SEP(**EXACT),
    "paper": dpbnn.SEP.paper(gamma=0.5, clip=0.7),
    "paper, blocks": dpbnn.SEP.paper(blocks=2),
}


def run(
    method, data, sampling="full-batch", likelihood=None, steps=4, sigma=20.0, hidden=(5,),
    **options,
):  # fmt: skip
    n = len(data[0])
    sizes = {"full-batch": {}, "poisson": {"batch_size": 10}, "partition": {"batch_size": 1}}
    relation = "replace-one" if sampling == "partition" else "zero-out"
    plan = dpbnn.plan(
        noise_multiplier=sigma, delta=1e-3, n=n, sampling=sampling, steps=steps,
        relation=relation, **sizes[sampling],
    )  # fmt: skip
    return dpbnn.fit(
        net(hidden), data, likelihood or GaussianNoise(NOISE), dpbnn.Gaussian(1.0), method, plan,
        **options,
    )  # fmt: skip


def public(posterior):
    return {
        **posterior.model.state_dict(),
        **{f"std.{n}": v for n, v in posterior.std.items()},
        "noise": torch.tensor(posterior.likelihood.noise_std),
    }


class TestItem25Neighbours:
    """Neighbour replay on the natural parameters; rejected factors still release."""

    @pytest.mark.parametrize("name", list(SETTINGS))
    @pytest.mark.parametrize("sampling", ["full-batch", "poisson"])
    def test_replay_for_every_setting(self, name, sampling):
        x, y = data()
        x[5] *= 100
        result = dpbnn.replay(
            lambda d: public(run(SETTINGS[name], d, sampling, steps=6)), (x, y), 5, trace=False
        )
        result.check()
        assert result.worst > 0

    def test_replay_with_two_hidden_layers(self):
        x, y = data()
        x[5] *= 100
        result = dpbnn.replay(
            lambda d: public(run(SETTINGS["momentum"], d, steps=6, hidden=(5, 4))), (x, y), 5,
            trace=False,
        )  # fmt: skip
        result.check()
        assert result.worst > 0

    def test_replay_of_a_pass_of_single_records(self):
        """A partition of batch size 1 under replace-one: the printed algorithm's own setting."""
        x, y = data(12)
        other = (x.clone(), y.clone())
        other[0][3], other[1][3] = -50.0, 70.0
        result = dpbnn.replay(
            lambda d: public(run(dpbnn.SEP.paper(), d, "partition", steps=24)), (x, y), other,
            trace=False,
        )  # fmt: skip
        result.check()
        moved = [i for i, distance in enumerate(result.distances) if distance > 0]
        assert moved == [3, 15]

    def test_replay_with_the_trace_of_calls_and_a_learned_noise(self):
        result = dpbnn.replay(
            lambda d: public(run(dpbnn.SEP(), d, likelihood=GaussianNoise(None))), data(), 3
        )
        result.check()

    def test_a_factor_that_is_rejected_is_released_as_zero_with_full_noise(self):
        """Rows that are not finite, or overflow, take part in every release as zeros."""
        x, y = data()
        x[7] = math.nan
        y[9] = 1e200
        posterior = run(dpbnn.SEP(), (x, y.clamp(-1e30, 1e30)), on_bad_rows="zero")
        assert all(value.isfinite().all() for value in public(posterior).values())
        assert posterior.privacy.private

    def test_a_sensitivity_that_forgets_the_blocks_is_caught(self):
        """Two blocks of clip C accounted for as one would move by sqrt(2) times the claim."""
        x, y = data()
        x[5], y[5] = 100 * x[5], 50.0
        method = SETTINGS["blocks"]

        def wrong(d):
            process = method.start(problem())
            gate = dpbnn.Gate({"mean.": 0.1, "precision.": 0.1}, 1.0)
            gate.clip = 0.1
            return gate(process.contribute(process.begin(), *d), records=torch.arange(N))

        with pytest.raises(dpbnn.PrivacyBug, match=r"1\.4"):
            dpbnn.replay(wrong, (x, y), 5, trace=False).check()


class TestNoise:
    """With zero contributions the noise is all there is, and the posterior moves by it."""

    def zero(self, process):
        coordinates = process.coordinates(process.begin())
        shapes = {n: torch.Size(s) for n, s in coordinates.shapes().items()}
        return DenseContributions({n: torch.zeros(1, *s) for n, s in shapes.items()})

    def release(self, sigma, clip):
        process = dpbnn.SEP(clip=clip).start(problem(net((400,))))
        gate = dpbnn.Gate(clip, sigma)
        values = gate(self.zero(process))
        return torch.cat([v.flatten() for v in values.values()]).numpy()

    def test_released_coordinates_have_std_sigma_times_clip(self):
        """KS test on 4002 coordinates, 20 releases; false alarm 1e-4, 5 % more must be seen."""
        sigma, clip = 3.0, 0.2
        values = np.concatenate([self.release(sigma, clip) for _ in range(20)])
        assert stats.kstest(values / (sigma * clip), "norm").pvalue > 1e-4
        assert stats.kstest(values / (1.05 * sigma * clip), "norm").pvalue < 1e-4

    def test_the_posterior_moves_by_the_noise(self):
        """In whitened coordinates the natural parameters move by rho (n/b) sigma C per step.

        KS test, false alarm 1e-4; a posterior that forgot the noise, or 5 % of it, is rejected.
        """
        sigma, clip, rho = 2.0, 0.05, 0.01
        moves = []
        for _ in range(20):
            settings = dpbnn.SEP(clip=clip, step_size=rho, **EXACT)
            process = settings.start(problem(net((400,)), batch_size=10))
            state = process.begin()
            before, coordinates = state.q, process.coordinates(state)
            state = process.update(state, dpbnn.Gate(clip, sigma)(self.zero(process)))
            change = coordinates.centred(state.q.plus(before, -1.0))
            vectors = coordinates.vectors(change)
            moves.append(torch.cat([v.flatten() for v in vectors.values()]).numpy())
        expected = rho * N / 10 * sigma * clip
        values = np.concatenate(moves)
        assert stats.kstest(values / expected, "norm").pvalue > 1e-4
        assert stats.kstest(values / (1.05 * expected), "norm").pvalue < 1e-4

    def test_the_printed_algorithm_has_the_printed_noise(self):
        """theta gets N(0, (sigma_P 2 gamma C/N)^2), where the gate's sigma is 2 sigma_P."""
        gamma, clip, paper = 0.5, 0.7, 1.3
        moves = []
        for _ in range(20):
            method = dpbnn.SEP.paper(gamma=gamma, clip=clip, floor=1e-9)
            process = method.start(problem(net((400,)), batch_size=1))
            state = process.begin()
            process._clipped = lambda natural: natural
            process._projected = lambda natural, before: natural
            before = state.q
            state = process.update(state, dpbnn.Gate(clip, 2 * paper)(self.zero(process)))
            shared = before.plus(process.prior, -1.0).times(1 / N)
            change = state.q.plus(before, -1.0).plus(shared, gamma / N)
            moves += [v.flatten().numpy() for v in change.first.values()]
        expected = 2 * paper * gamma * clip / N
        values = np.concatenate(moves)
        assert stats.kstest(values / expected, "norm").pvalue > 1e-4
        assert stats.kstest(values / (1.05 * expected), "norm").pvalue < 1e-4

    def test_noise_reaches_the_saved_posterior(self):
        a, b = (public(run(dpbnn.SEP(), data())) for _ in range(2))
        assert all(not torch.equal(a[n], b[n]) for n in a if n != "noise")


class TestExactAnswers:
    """The private path with whitened coordinates, no noise and an infinite clip."""

    def linear(self):
        return nn.Sequential(nn.Linear(1, 1, bias=False)).double()

    def conjugate(self, n=30):
        generator = torch.Generator().manual_seed(4)
        x = 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
        y = 1.7 * x[:, 0] + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)
        precision = 1.0 + float(x.square().sum()) / NOISE**2
        return x, y, float((x[:, 0] * y).sum()) / NOISE**2 / precision, precision

    def test_one_weight_reaches_the_exact_posterior(self):
        """Conjugate Gaussian: factors do not depend on the cavity, so one whole step is exact."""
        x, y, mean, precision = self.conjugate()
        process = dpbnn.SEP(step_size=1.0, **EXACT).start(
            dataclasses.replace(problem(self.linear(), n=30))
        )
        q = process.final(open_step(process, process.begin(), x, y)).moments()
        assert float(q.mean["0"]) == pytest.approx(mean, rel=1e-9)
        assert float(1 / q.covariance["0"]) == pytest.approx(precision, rel=1e-9)

    def test_ep_is_exact_on_it_in_one_pass(self):
        x, y, mean, precision = self.conjugate()
        for method in (dpbnn.EP(damping=1.0, refine=False),):
            plan = dpbnn.open_plan(n=30, sampling="full-batch", steps=1)
            posterior = dpbnn.fit(
                self.linear(), (x, y), GaussianNoise(NOISE), dpbnn.Gaussian(1.0), method, plan
            )
            assert float(posterior.model[0].weight.detach()) == pytest.approx(mean, rel=1e-9)
            assert float(posterior.std["0.weight"]) == pytest.approx(precision**-0.5, rel=1e-9)

    @pytest.mark.parametrize("coordinates", ["whitened", "raw"])
    def test_copies_of_one_record_give_the_fixed_point_of_ep(self, coordinates):
        """With N copies all of EP's sites are equal, so SEP's shared factor is each of them."""
        x, y = (part[:1].repeat(N, *[1] * (part.dim() - 1)) for part in data())
        model = net()
        process = dpbnn.SEP(step_size=0.2, coordinates=coordinates, **EXACT).start(
            problem(model, steps=200)
        )
        state = process.begin()
        for _ in range(200):
            state = open_step(process, state, x, y)
        plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=100)
        ep = dpbnn.fit(
            model, (x, y), GaussianNoise(NOISE), dpbnn.Gaussian(1.0),
            dpbnn.EP(damping=0.5, refine=False), plan,
        )  # fmt: skip
        ours = process.posterior(state)
        for name, value in ep.std.items():
            torch.testing.assert_close(ours.std[name], value, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(
            ours.moments(x[:1])[0], ep.moments(x[:1])[0], rtol=1e-3, atol=1e-4
        )

    def test_single_records_with_weight_one_are_the_sep_of_li(self):
        """Partition of batch size 1 and rho = 1/n on the private path equals `SEP.original`."""
        x, y = data(15)
        model = net()
        process = dpbnn.SEP(step_size=1 / 15, **EXACT).start(
            problem(model, n=15, batch_size=1, steps=45)
        )
        reference = dpbnn.SEP.original(refine=False).start(problem(model, n=15, private=False))
        state, other = process.begin(), reference.begin()
        for i in [*range(15)] * 3:
            state = open_step(process, state, x[i : i + 1], y[i : i + 1])
            reference.record(other, other.noise, i, x[i].numpy(), float(y[i]))
        ours, theirs = state.q, reference.natural(other)
        for name in ours.first:
            torch.testing.assert_close(ours.first[name], theirs.first[name], rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(ours.second[name], theirs.second[name], rtol=1e-6, atol=1e-9)

    def test_the_printed_update_moves_the_factor_by_gamma_over_n_squared(self):
        """theta_f moves by (gamma/N^2)(f_n - theta_f), a factor N below the SEP of Li et al."""
        x, y = data()
        gamma = 0.8
        method = dpbnn.SEP.paper(gamma=gamma, clip=1e9, floor=1e-9)
        process = method.start(problem(batch_size=1))
        state = process.begin()
        before, cavity = process.shared(state.q), process.coordinates(state).cavity
        factors = process.moments.factors(cavity, x[:1], y[:1])
        cavity = cavity.mean
        after = process.shared(open_step(process, state, x[:1], y[:1]).q)
        for name in before.second:
            f = factors.curvature[name][0]
            expected = before.second[name] + gamma / N**2 * (f - before.second[name])
            torch.testing.assert_close(after.second[name], expected)
            first = factors.slope[name][0] + f * cavity[name]
            expected = before.first[name] + gamma / N**2 * (first - before.first[name])
            torch.testing.assert_close(after.first[name], expected)

    def test_clipped_sep_clips_without_noise(self):
        plan = dpbnn.open_plan(n=N, sampling="full-batch", steps=5)
        fitted = [
            dpbnn.fit(net(), data(), GaussianNoise(NOISE), None, method, plan)
            for method in (
                dpbnn.SEP(clip=1e-6),
                dpbnn.SEP(clip=1e-6, always_clip=True),
            )
        ]
        start = net()
        free, clipped = (
            float((p.model[1].weight - start[1].weight).detach().norm()) for p in fitted
        )
        assert clipped < 1e-3 * free
        assert "NOT PRIVATE" in str(fitted[1].privacy)


def _whole_and_resumed(folder, monkeypatch, sampling, after):
    """Return a run of 10 steps, and one with the same keys that was stopped and gone on with."""
    monkeypatch.setattr(secrets, "token_bytes", lambda n=32: bytes(range(n)))
    method = dpbnn.SEP(momentum=0.5, weight=2.0, average=0.7, heat=4.0, start_variance=0.3)

    def fitted(out, **options):
        return run(
            method, data(), sampling, GaussianNoise(None), steps=10, hidden=(5, 4), out=out,
            checkpoint_every=3, **options,
        )  # fmt: skip

    whole = fitted(folder / "whole")
    with stopped_after(after):
        fitted(folder / "run")
    return whole, fitted(folder / "run", resume=True)


class TestRuns:
    def test_it_learns_at_a_small_epsilon(self):
        """A sine of a sum from 3000 records at epsilon 1: far below the target's deviation."""
        x, y = data(3000)
        plan = dpbnn.plan(epsilon=1.0, delta=1e-5, n=3000, sampling="full-batch", steps=60)
        posterior = dpbnn.fit(
            lambda: dpbnn.mlp(3, (20,), 1), (x.float(), y.float()), GaussianNoise(0.3),
            dpbnn.Gaussian(2.0), dpbnn.SEP(step_size=(0.1, 0.02), clip=0.2, weight=3.0), plan,
        )  # fmt: skip
        predictive = posterior.predict(x.float())
        rmse = float((predictive.mean - y).square().mean().sqrt())
        assert rmse < 0.35 < 0.69 < float(y.std())
        assert posterior.privacy.epsilon <= 1.0
        assert (predictive.epistemic > 0).all()

    def test_a_learned_noise_finds_the_noise(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2000, 2, generator=generator)
        y = x.sum(1) + 0.3 * torch.randn(2000, generator=generator)
        plan = dpbnn.plan(noise_multiplier=5.0, delta=1e-5, n=2000, sampling="full-batch", steps=80)
        posterior = dpbnn.fit(
            lambda: dpbnn.mlp(2, (8,), 1), (x, y), GaussianNoise(None), dpbnn.Gaussian(1.0),
            dpbnn.SEP(step_size=0.1, clip=0.5), plan,
        )  # fmt: skip
        assert posterior.likelihood.noise_std == pytest.approx(0.3, abs=0.06)

    def test_a_run_goes_on_from_its_state(self):
        x, y = data()
        method = dpbnn.SEP(momentum=0.5, average=0.8)

        def start():
            return method.start(problem(noise=None))

        whole, other = start(), start()
        state = whole.begin()
        for _ in range(3):
            state = open_step(whole, state, x, y)
        resumed = other.resumed(other.begin(), flat(state))
        for _ in range(5):
            state = open_step(whole, state, x, y)
            resumed = open_step(other, resumed, x, y)
        assert state.noise == resumed.noise != whole.moments.noise
        assert flat(state).keys() == flat(resumed).keys()
        for name, value in flat(state).items():
            assert torch.equal(flat(resumed)[name], value), name

    @pytest.mark.parametrize("sampling", ["full-batch", "poisson"])
    @pytest.mark.parametrize("after", [4, 7])
    def test_a_run_that_was_interrupted_equals_the_uninterrupted_one(
        self, tmp_path, monkeypatch, sampling, after
    ):
        """Through `fit(..., out=...)`: Ctrl-C after some updates, then resume."""
        whole, resumed = _whole_and_resumed(tmp_path, monkeypatch, sampling, after)
        for name, value in public(whole).items():
            assert torch.equal(public(resumed)[name], value), name
        assert dpbnn.Ledger(tmp_path / "run" / "ledger.jsonl").releases == 10
        assert resumed.privacy.epsilon == pytest.approx(whole.privacy.epsilon)

    @pytest.mark.parametrize("lost", ["velocity", "average.values", "noise"])
    def test_a_checkpoint_with_another_part_is_seen(self, tmp_path, monkeypatch, lost):
        resumed = SEPProcess.resumed

        def without(self, state, tensors):
            other = {n: v / 2 for n, v in tensors.items() if n.startswith(lost)}
            assert other
            return resumed(self, state, {**tensors, **other})

        monkeypatch.setattr(SEPProcess, "resumed", without)
        whole, resumed = _whole_and_resumed(tmp_path, monkeypatch, "full-batch", 7)
        pairs = zip(public(whole).values(), public(resumed).values(), strict=True)
        assert not all(torch.equal(a, b) for a, b in pairs)

    @pytest.mark.parametrize("lost", ["velocity", "average.values", "noise"])
    def test_a_checkpoint_that_loses_a_part_is_refused(self, tmp_path, monkeypatch, lost):
        resumed = SEPProcess.resumed

        def without(self, state, tensors):
            kept = {n: v for n, v in tensors.items() if not n.startswith(lost)}
            assert len(kept) < len(tensors)
            return resumed(self, state, kept)

        monkeypatch.setattr(SEPProcess, "resumed", without)
        with pytest.raises(ValueError, match="does not fit this network and method"):
            _whole_and_resumed(tmp_path, monkeypatch, "full-batch", 7)

    def test_microbatches_change_nothing(self):
        x, y = data()
        results = [
            public(run(dpbnn.SEP(), (x, y), debug_seed=1, microbatch_size=size))
            for size in (None, 7)
        ]
        for name, value in results[0].items():
            torch.testing.assert_close(results[1][name], value)

    def test_a_saved_posterior_predicts_the_same(self, tmp_path):
        posterior = run(dpbnn.SEP(), data())
        posterior.save(tmp_path / "run")
        again = dpbnn.load(tmp_path / "run")
        x, _ = data(7, seed=3)
        assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
        assert torch.equal(again.predict(x).variance, posterior.predict(x).variance)
        assert again.privacy == posterior.privacy


class TestBadInput:
    def fit(self, x, y, method=None, likelihood=None, n=None, **options):
        plan = dpbnn.plan(
            noise_multiplier=5.0, delta=1e-3, n=len(x) if n is None else n, sampling="full-batch",
            steps=15,
        )  # fmt: skip
        return dpbnn.fit(
            dpbnn.mlp(x.shape[1], (5,), 1), (x, y), likelihood or GaussianNoise(NOISE), None,
            method or dpbnn.SEP(), plan, **options,
        )  # fmt: skip

    def test_few_records_are_refused(self):
        with pytest.raises(ValueError, match=r"n=7: .* 10 records"):
            self.fit(torch.randn(7, 3), torch.randn(7))

    def test_targets_that_are_not_finite_are_refused_before_anything_is_spent(self):
        ledger = dpbnn.Ledger()
        y = torch.randn(20)
        y[3] = math.inf
        with pytest.raises(ValueError, match="1 row cannot be used"):
            self.fit(torch.randn(20, 3), y, ledger=ledger)
        with pytest.raises(ValueError, match="1 is Tanh"):
            dpbnn.fit(
                nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)),
                (torch.randn(20, 3), torch.randn(20)), "gaussian", None, dpbnn.SEP(),
                dpbnn.plan(noise_multiplier=5.0, delta=1e-3, n=20, sampling="full", steps=2),
                ledger=ledger,
            )  # fmt: skip
        assert ledger.releases == 0

    @pytest.mark.parametrize(
        ("x", "y"),
        [
            (torch.ones(20, 3), torch.ones(20)),
            (torch.randn(20, 3), torch.zeros(20)),
            (1e18 * torch.randn(20, 3), 1e18 * torch.randn(20)),
            (torch.zeros(20, 3), 1e30 * torch.ones(20)),
        ],
        ids=["constant", "constant target", "huge", "overflowing"],
    )
    @pytest.mark.parametrize("noise", [NOISE, None, 1e-6])
    def test_no_data_makes_a_posterior_that_is_not_finite(self, x, y, noise):
        for method in (dpbnn.SEP(), dpbnn.SEP(trust=None, step_size=1.0), dpbnn.SEP.paper()):
            posterior = self.fit(x, y, method, GaussianNoise(noise))
            assert all(value.isfinite().all() for value in public(posterior).values())
            predictive = posterior.predict(torch.randn(4, 3))
            assert predictive.mean.isfinite().all()
            assert (predictive.variance > 0).all()

    @pytest.mark.parametrize("method", [dpbnn.SEP(trust=None, step_size=1.0), dpbnn.SEP()])
    def test_without_privacy_overflow_is_guarded_too(self, method):
        plan = dpbnn.open_plan(n=20, sampling="full-batch", steps=30)
        x, y = 1e12 * torch.randn(20, 3), 1e12 * torch.randn(20)
        model = dpbnn.mlp(3, (5,), 1)
        posterior = dpbnn.fit(model, (x, y), GaussianNoise(1e-4), None, method, plan)
        assert all(value.isfinite().all() for value in public(posterior).values())

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: dpbnn.SEP(step_size=-1.0), "step_size=-1"),
            (lambda: dpbnn.SEP(clip=0.0), "clip=0"),
            (lambda: dpbnn.SEP(momentum=1.0), "momentum=1"),
            (lambda: dpbnn.SEP(coordinates="polar"), "coordinates='polar'"),
            (lambda: dpbnn.SEP(blocks=4), "blocks=4"),
            (lambda: dpbnn.SEP(average=1.5), "average=1.5"),
            (lambda: dpbnn.SEP(cooling=2.0), "cooling=2"),
            (lambda: dpbnn.EP(damping=0.0), "damping=0"),
        ],
    )
    def test_bad_settings_say_so(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_a_learned_noise_with_blocks_is_refused(self):
        with pytest.raises(ValueError, match="blocks=1"):
            self.fit(torch.randn(20, 3), torch.randn(20), SETTINGS["blocks"], GaussianNoise(None))


def test_update_sees_the_release_and_nothing_else():
    process = dpbnn.SEP().start(problem())
    assert isinstance(process, SEPProcess)
    x, y = data()
    state = step(process, process.begin(), dpbnn.Gate(0.2, 1.0), x, y)
    assert_holds_no_data((process, state), x, y)
    process.moments.cache = [x[:3]]
    with pytest.raises(AssertionError, match="a value is held"):
        assert_holds_no_data((process, state), x, y)
